"""What is read from XLA's dumps."""

from jaxrl.planner.buffers import memory

ASSIGNMENT = """BufferAssignment:
allocation 0: size 512, thread-local:
 value: <8 add.3 @0> (size=512,offset=0): bf16[]{:T(256)}
allocation 1: size 8192, parameter 0, shape |bf16[32,128]| at ShapeIndex {}:
 value: <88 param.1 @0> (size=8192,offset=0): bf16[32,128]{1,0:T(8,128)(2,1)}
allocation 2: size 5000, preallocated-temp:
 value: <93 fusion.7 @0> (size=4000,offset=0): bf16[2000]{0}
 value: <94 copy.2{0} @0> (size=100,offset=0): bf16[50]{0}
 value: <95 while.1 @0> (size=1000,offset=4000): (bf16[500]{0}, u32[])
allocation 3: size 60000, color 1, preallocated-temp:
 value: <91 copy-start{0} @1> (size=60000,offset=0): bf16[4096]{1,0:S(1)}
"""
HLO = """HloModule jit_f
ENTRY %main {
  %param.1 = bf16[32,128]{1,0} parameter(0), metadata={op_name="params[\\'up\\']"}
  %fusion.7 = bf16[2000]{0} fusion(%param.1), kind=kLoop, metadata={op_name="jit(f)/while/body/exp"}
}
"""


def test_memory_is_the_sum_of_allocations_in_hbm(tmp_path):
    (tmp_path / "module_1.jit_f.after_optimizations-buffer-assignment.txt").write_text(ASSIGNMENT)
    (tmp_path / "module_1.jit_f.after_optimizations.txt").write_text(HLO)
    found = memory(tmp_path)
    assert (found.total, found.arguments) == (512 + 8192 + 5000, 8192)
    assert found.largest[:2] == (("while/body/exp bf16[2000]", 4000), ("while.1 bf16[500]", 1000))


def test_an_empty_dump_says_nothing(tmp_path):
    assert memory(tmp_path).total == 0
