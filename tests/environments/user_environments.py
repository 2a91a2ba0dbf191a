"""Environments as users write them, well-behaved and otherwise."""

import os
import time

from jaxrl.environments import Step


class Echo:
    """Answers with how often it was asked and the end of what was said; done at a "#"."""

    def __init__(self, *, room: int = 3):
        self.room = room

    def reset(self, example):
        return {"asked": 0, "name": example["name"]}

    def step(self, messages, state):
        text = messages[-1]["content"]
        asked = state["asked"] + 1
        return Step(
            observation=f"{state['name']}{asked}:{text[-self.room :]}",
            reward=0.5,
            done="#" in text,
            state={**state, "asked": asked},
            metrics={"asked": 1},
        )


class Rough(Echo):
    """Does at the second turn what the row says."""

    def step(self, messages, state):
        if state["asked"] == 1:
            if state["name"] == "hang":
                time.sleep(60)
            if state["name"] == "exit":
                os._exit(7)
            if state["name"] == "raise":
                raise RuntimeError("no such thing")
            if state["name"] == "number":
                return 3
            if state["name"] == "nan":
                return Step(reward=float("nan"))
            if state["name"] == "message":
                return Step(observation=[{"role": "tool"}])
        return super().step(messages, state)


class Short:
    """Has no reset."""

    def step(self, messages, state):
        return Step(done=True)
