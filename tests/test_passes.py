"""The compiled one-pass loops against their twin in PyTorch, and the twin against plain float64 sums."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmask import Blocks, masked_mean
from fedmask.passes import MeanOf, chunked_pass, compiled_kernels, one_pass, squared_norms

GRANULARITIES = ("element", "row", "tensor", "layer", "model")
LAYOUTS = {
    "contiguous": lambda u: u,
    "one row in two": lambda u: u.repeat_interleave(2, dim=0)[::2],
    "one column in two": lambda u: u.repeat_interleave(2, dim=1)[:, ::2],
    "transposed": lambda u: u.T.contiguous().T,
}


@st.composite
def passes(draw: st.DrawFn):
    """Updates of 1 to 12 clients whose tensors may be longer than a segment, in any type and layout."""
    shapes = draw(
        st.lists(
            st.sampled_from([(), (1,), (3,), (7, 5), (2, 1030), (1025,), (2049,), (40, 9, 3, 3), (0, 4)]),
            min_size=1,
            max_size=4,
        ).filter(lambda shapes: any(0 not in shape for shape in shapes))
    )
    model = {f"layer{i // 2}.{i}": torch.zeros(shape) for i, shape in enumerate(shapes)}
    blocks = Blocks.of(model, draw(st.sampled_from(GRANULARITIES)))
    cut = blocks.at(draw(st.sampled_from(GRANULARITIES[1:])))
    clients = draw(st.integers(1, 12))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    updates = torch.from_numpy(
        random.standard_normal((clients, blocks.parameters)) * 10.0 ** draw(st.integers(-30, 30))
    )
    updates = updates.to(draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])))
    updates = torch.where(updates.isfinite(), updates, 1.0)
    updates = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](updates)
    counts = random.integers(0, 500, clients).astype(np.float64)
    counts[random.integers(clients)] = 7
    masks = random.random((clients, blocks.count)) < 0.5 if draw(st.booleans()) else None
    per_block = draw(st.booleans())
    factors = 1 / (counts.sum() * (random.uniform(0.1, 1, blocks.count) if per_block else np.array([0.5])))
    return updates, cut, counts, MeanOf(blocks, masks, factors)


@pytest.mark.skipif(compiled_kernels() is None, reason="Numba is not installed: there are no compiled loops to test")
@given(passes())
def test_the_compiled_loops_equal_their_twin(case):
    updates, cut, counts, mean = case
    wide = updates.double().numpy()
    for statistics in ("gram", "sums", "none"):
        fast = one_pass(updates, cut, counts, statistics=statistics, mean=mean)
        slow = chunked_pass(updates, cut, counts, statistics=statistics, mean=mean)
        assert fast.mean.dtype == slow.mean.dtype == torch.promote_types(updates.dtype, torch.float32)
        if updates.dtype == torch.float64:  # n_k·Δ_k is rounded, or not where the processor adds in the same step
            bound = 2.0**-52 * len(counts) * (counts @ np.abs(wide)) * mean.factors.max()
            assert np.all(np.abs((fast.mean - slow.mean).numpy()) <= bound)
        else:
            assert torch.equal(fast.mean, slow.mean)
        for name in ("gram", "squared_norms", "squared_norm_of_sum", "squared_norm_of_weighted_sum"):
            ours, theirs = getattr(fast, name), getattr(slow, name)
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert ours.shape == theirs.shape
                scale = counts.max() ** 2 * np.sum(wide**2) * len(counts)
                assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-13 * scale)


@given(passes())
def test_the_twin_equals_sums_written_out(case):
    updates, cut, counts, mean = case
    wide = updates.double().numpy()
    owner = np.repeat(np.arange(cut.count), cut.sizes)
    gram = chunked_pass(updates, cut, counts, statistics="gram").gram
    sums = chunked_pass(updates, cut, counts, statistics="sums")
    for b in range(cut.count):
        part = wide[:, owner == b]
        size = np.sum(part**2) * len(part) * counts.max() ** 2
        assert gram[b] == pytest.approx(part @ part.T, rel=1e-12, abs=1e-13 * size)
        assert sums.squared_norms[b] == pytest.approx(np.sum(part**2, axis=1), rel=1e-12)
        assert sums.squared_norm_of_sum[b] == pytest.approx(np.sum(part.sum(0) ** 2), rel=1e-12, abs=1e-13 * size)
        weighted = np.sum((counts @ part) ** 2)
        assert sums.squared_norm_of_weighted_sum[b] == pytest.approx(weighted, rel=1e-12, abs=1e-13 * size)
    masks = np.ones((len(wide), mean.blocks.count)) if mean.masks is None else mean.masks
    scale = np.repeat(np.broadcast_to(mean.factors, mean.blocks.count), mean.blocks.sizes)
    expected = counts @ (np.repeat(masks, mean.blocks.sizes, axis=1) * wide) * scale
    bound = 2.0**-23 * np.abs(expected) + 2.0**-50 * len(counts) * (counts @ np.abs(wide)) * scale + 2.0**-149
    found = chunked_pass(updates, cut, counts, statistics="none", mean=mean).mean.double().numpy()
    assert np.all(np.abs(found - expected) <= bound)


@given(passes())
def test_squared_norms_of_one_vector(case):
    updates, cut, _, _ = case
    gram = chunked_pass(updates[:1], cut, np.ones(1), statistics="gram").gram
    assert squared_norms(updates[0], cut) == pytest.approx(gram[:, 0, 0], rel=1e-12)


def test_threads_change_no_bit():
    blocks = Blocks.of({"a": torch.zeros(300, 1000), "b": torch.zeros(40_000)})
    updates = torch.randn(11, blocks.parameters, generator=torch.Generator().manual_seed(0))
    masks = np.random.default_rng(0).random((11, 2)) < 0.5
    outcomes = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            outcomes.append(
                [masked_mean(updates, blocks, masks=masks, p=0.5, statistics=kind) for kind in ("gram", "sums", "none")]
            )
    finally:
        torch.set_num_threads(before)
    for others in outcomes[1:]:
        for one, other in zip(outcomes[0], others, strict=True):
            assert torch.equal(one.mean, other.mean)
            if one.sums is not None:
                for name, value in vars(one.sums).items():
                    assert np.array_equal(value, getattr(other.sums, name))


def test_what_is_dropped_is_not_read():
    """Without statistics a NaN in a dropped block stays unseen; half of the reading is saved."""
    blocks = Blocks.of({"a": torch.zeros(2000), "b": torch.zeros(3)})
    updates = torch.ones(2, blocks.parameters)
    updates[1, :2000] = float("nan")
    masks = np.array([[True, True], [False, True]])
    mean = masked_mean(updates, blocks, masks=masks, p=0.5, statistics="none").mean
    assert torch.equal(mean, torch.cat([torch.ones(2000), torch.full((3,), 2.0)]))


def test_without_numba_everything_still_works():
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "import torch; from fedmask import Blocks, masked_mean, recovery_factor\n"
        "from fedmask.passes import compiled_kernels; assert compiled_kernels() is None\n"
        "out = masked_mean(torch.ones(4, 6), Blocks.of({'w': torch.zeros(6)}))\n"
        "print(recovery_factor(out.gram).value, out.mean.tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "4.0 [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]"


INTERPRETED = """
import numpy as np, torch
from fedmask import Blocks
from fedmask.passes import MeanOf, chunked_pass, triton_kernels, triton_pass

random = np.random.default_rng({seed})
model = {{"a.w": torch.zeros(5, 130), "a.b": torch.zeros(()), "b.w": torch.zeros(2, 4200), "b.b": torch.zeros(3)}}
cases = (
    (1, "tensor", "tensor", torch.float32, True, 1),
    (2, "row", "tensor", torch.float32, True, 2),
    (10, "layer", "row", torch.float64, False, 2),
    (10, "tensor", "model", torch.bfloat16, True, 2),
    (17, "model", "layer", torch.float32, False, 1),
)
for clients, granularity, cut, dtype, masked, factors in cases:
    blocks, statistics_blocks = Blocks.of(model, granularity), Blocks.of(model, cut)
    updates = torch.from_numpy(random.standard_normal((clients, blocks.parameters))).to(dtype)
    counts = random.integers(1, 500, clients).astype(np.float64)
    masks = random.random((clients, blocks.count)) < 0.5 if masked else None
    mean = MeanOf(blocks, masks, random.uniform(1, 2, 1 if factors == 1 else blocks.count) / counts.sum())
    for statistics in ("gram", "sums", "none"):
        ours = triton_pass(triton_kernels(), updates, statistics_blocks, counts, statistics, mean)
        twin = chunked_pass(updates, statistics_blocks, counts, statistics=statistics, mean=mean)
        torch.testing.assert_close(ours.mean, twin.mean, rtol=2**-22, atol=1e-12)
        for name in ("gram", "squared_norms", "squared_norm_of_sum", "squared_norm_of_weighted_sum"):
            a, b = getattr(ours, name), getattr(twin, name)
            assert (a is None) == (b is None), name
            if a is not None:
                np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-9)
alone = triton_pass(triton_kernels(), updates, statistics_blocks, counts, "gram")
assert alone.mean is None and alone.gram.shape == (statistics_blocks.count, clients, clients)
print("equal")
"""


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fedmask.triton_kernels import TILE, one_pass_kernel

doubles = ("weights", "factors", "counts", "gram", "plain_norms", "weighted_norms")
for statistics in (0, 1, 2):
    constants = {"one_factor": True, "with_mean": True, "statistics": statistics, "rows": 16, "tile": TILE}
    types = dict.fromkeys(doubles, "*fp64") | dict.fromkeys(constants, "constexpr")
    types |= {"updates": "*fp32", "row_stride": "i64", "segments": "*i64", "mean": "*fp32", "clients": "i32"}
    signature = {name: types[name] for name in one_pass_kernel.arg_names}
    source = ASTSource(fn=one_pass_kernel, signature=signature, constexprs=constants)
    assembly = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert ".target sm_90" in assembly
    assert ("mma.sync" in assembly) == (statistics == 2)  # float64 products on the tensor cores
print("compiled")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "interpret", "said"), [(INTERPRETED.format(seed=0), "1", "equal"), (COMPILED, "0", "compiled")]
)
def test_the_cuda_kernel_equals_its_twin_when_interpreted_and_compiles_for_a_gpu_that_is_not_here(
    code, interpret, said
):
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == said
