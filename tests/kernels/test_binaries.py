"""The figures read from PTX and assembly, on hand-made texts."""

from __future__ import annotations

from kvrelay.kernels.binaries import (
    PROCESSORS,
    LoopInstructions,
    amdgcn_resources,
    loop_instructions,
    programs_per_processor,
)

_PTX = """
.visible .entry kernel()
{
\tld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
\tmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1 }, { %r2 };
$L__BB0_1:
\t@%p1 ld.global.L1::evict_first.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ];
\t@%p1 ld.global.b16 { %rs1 }, [ %rd1 + 0 ];
\tcp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
\tcp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 4, %r2;
\t@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r1, %r2}], [%r3];
\t@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r1, %r2}], [%r3];
\tcp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, %r2}], [%r3];
\tld.shared.b8 %rs1, [%r1+5];
\tld.shared.b64 %rs1, [%r1+5];
\twgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%r1}, %rd1;
\twgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%r1}, %rd1;
\t@%p2 bra $L__BB0_2;
\t@%p3 bra $L__BB0_1;
$L__BB0_2:
\tld.global.b8 { %rs1 }, [ %rd1 + 0 ];
\tret;
}
"""


def test_only_what_is_repeated_counts() -> None:
    assert loop_instructions(_PTX) == LoopInstructions({2: 1, 4: 1, 8: 1, 16: 1}, 2, 1, "wgmma", 2)
    assert loop_instructions("\tld.global.b32 { %r1 }, [ %rd1 ];\n") == LoopInstructions({}, 0, 0, None, 0)


def test_the_scarcest_resource_bounds_the_programs() -> None:
    hopper = PROCESSORS["cuda", 90]
    assert programs_per_processor(hopper, 128, 32, 0) == 16  # 2048 threads
    assert programs_per_processor(hopper, 32, 32, 0) == 32
    assert programs_per_processor(hopper, 128, 100, 0) == 4  # 104 registers are allocated for each thread
    assert programs_per_processor(hopper, 128, 104, 71680) == 3
    assert programs_per_processor(hopper, 128, 32, 227 * 1024) == 1
    assert programs_per_processor(PROCESSORS["hip", "gfx942"], 256, 128, 0) == 4


def test_assembly_of_the_other_maker() -> None:
    text = ".private_segment_fixed_size: 0\n  - .vgpr_count: 9\n.vgpr_spill_count: 3\n"
    assert amdgcn_resources(text) == (9, 12)
