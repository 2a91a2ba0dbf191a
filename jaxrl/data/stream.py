"""An endless or finite stream over a dataset, that stops and continues at any row. The order is grain's."""

from __future__ import annotations

import logging
import os
from typing import Any, Protocol

import numpy as np
from absl import flags

from jaxrl.config import ConfigError, UserCodeError

logger = logging.getLogger("jaxrl")


class Dataset(Protocol):
    """Items by number. ``fingerprint`` tells whether they are still the same ones."""

    fingerprint: int

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Stream:
    """Items in the order of ``seed``, a new one in every epoch, each item once per epoch.

    The state is a position, which counts items handed out since the start: what was prepared ahead does not
    count, and the number of workers may change between runs.

    Args:
        seed: of the order; any int >= 0.
        epochs: None is endless.
        workers: processes that prepare items ahead; 0 is one thread. The order does not depend on it.
        ahead: items to prepare ahead.
        section: of the settings, for messages.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        seed: int,
        shuffle: bool,
        epochs: int | None,
        workers: int,
        ahead: int,
        section: str = "data",
    ):
        self.dataset, self.position = dataset, 0
        self._seed, self._shuffle, self._epochs = seed, shuffle, epochs
        self._workers, self._ahead, self._section = workers, ahead, section
        self._iterator: Any = None

    def read(self, count: int) -> list[Any]:
        """The next ``count`` items, fewer at the end of the last epoch, and then none.

        Raises:
            ConfigError, UserCodeError: what preparing an item raised; the stream stays where it was.
        """
        if self._iterator is None:
            self._iterator = iter(self._pipeline())
        items: list[Any] = []
        while len(items) < count:
            item = next(self._iterator, None)
            if item is None:
                break
            if item.error is not None:
                self.close()
                raise item.error
            items.append(item.value)
        self.position += len(items)
        return items

    @property
    def ended(self) -> bool:
        """True when the last epoch has been read to its end."""
        return self._epochs is not None and self.position >= self._epochs * len(self.dataset)

    def get_state(self) -> dict[str, Any]:
        """JSON-able; ``set_state`` of it continues with the very next item."""
        return {"position": self.position, **self._identity()}

    def set_state(self, state: dict[str, Any], strict: bool = True) -> None:
        """Continue where ``state`` was taken; at the same position of other data when not ``strict``.

        Raises:
            ConfigError: ``strict``, and the rows, their rendering or their order are no longer those of the
                state.
        """
        for name, value in self._identity().items():
            if state.get(name) != value:
                what = (
                    f"the data is not what it was when this state was saved: {name} was {state.get(name)}, "
                    f"now it is {value}"
                )
                if strict:
                    raise ConfigError(
                        f"{what}. Give the same data, templates, tokenizer and seed to continue, or begin a "
                        "new run from the saved weights",
                        self._section,
                    )
                logger.warning("%s; continuing at row %d of the new one", what, state["position"])
        self.close()
        self.position = state["position"]

    def close(self) -> None:
        """Stop the workers; a later ``read`` starts them again at the same position."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None

    def _identity(self) -> dict[str, Any]:
        return {
            "rows": len(self.dataset),
            "fingerprint": self.dataset.fingerprint,
            "seed": self._seed if self._shuffle else None,
            "shuffle": self._shuffle,
        }

    def _pipeline(self) -> Any:
        import grain

        items = grain.MapDataset.source(_Caught(self.dataset))
        if self._shuffle:
            # grain adds the epoch to the seed; mixing keeps neighbouring seeds from sharing orders.
            items = items.shuffle(seed=int(np.random.SeedSequence(self._seed).generate_state(1)[0]))
        # A finite number of epochs is a slice of the endless stream, so that both have the same order.
        end = None if self._epochs is None else self._epochs * len(self.dataset)
        items = items.repeat(None)[self.position : end]
        each = max(1, self._ahead // max(self._workers, 1))
        stream = items.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=each))
        if self._workers:
            # grain's workers read their defaults from absl's flags, which nobody parses in our programs.
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()
            options = grain.MultiprocessingOptions(num_workers=self._workers, per_worker_buffer_size=each)
            stream = stream.mp_prefetch(options, worker_init_fn=_start_worker)
        return stream


class _Item:
    """A value or an error; opaque to grain, which would take a dict or tuple apart."""

    def __init__(self, value: Any = None, error: Exception | None = None):
        self.value, self.error = value, error


class _Caught:
    """The dataset with errors of the user's making as items, so that they arrive whole from a worker."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> _Item:
        try:
            return _Item(self.dataset[int(index)])
        except (ConfigError, UserCodeError) as error:
            return _Item(error=error)


def _start_worker(worker: int, workers: int) -> None:
    """The devices belong to the main process: a worker that imports jax must not open them."""
    os.environ["JAX_PLATFORMS"] = "cpu"
