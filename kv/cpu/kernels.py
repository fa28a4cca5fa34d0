"""Kernels for weights that stay quantised, in MLX's affine form: w = scale * q + bias, a scale and a bias a group.

Numba compiles them for the processor they run on, and keeps the code beside this file. Weights are laid out so that
32 outputs are the lanes of a vector: nothing is summed across lanes, and every row's numbers are added up in the same
order, however many rows there are. Products are exact but for rounding: the file's own weights, in float32.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from kv.cpu import blas, pool

Floats = npt.NDArray[np.float32]

# Outputs that lie side by side.
BLOCK = 32
# Blocks that are dequantised together for BLAS.
_WIDE = 4
_BYTE, _FLOAT, _HALF, _WORD = ir.IntType(8), ir.FloatType(), ir.HalfType(), ir.IntType(64)
_F32 = np.float32


@lru_cache(maxsize=1)
def _lanes() -> int:
    """Floats in a vector of this processor; where it is not known, 8, which others do in two halves."""
    return 16 if llvm.get_host_cpu_features().get("avx512f") else 8


def most_rows() -> int:
    """Rows that share one reading of the weights: as many as the processor has registers for."""
    return 8 if _lanes() == 16 else 4


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    one = builder.insert_element(ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes))


def _vector(builder: Any, base: Any, kind: Any, index: Any, lanes: int) -> Any:
    """`lanes` numbers of `kind` from `index` on, wherever they lie."""
    pointer = builder.gep(builder.inttoptr(base, kind.as_pointer()), [index])
    vector = builder.load(builder.bitcast(pointer, ir.VectorType(kind, lanes).as_pointer()))
    vector.align = 1
    return vector


def _quants(builder: Any, q: Any, index: Any, bits: int, half: int, lanes: int) -> tuple[Any, Any]:
    """Weights k and k + half of a group as floats, from byte `index` (of weight k) on."""
    wide = ir.VectorType(ir.IntType(32), lanes)
    floats = ir.VectorType(_FLOAT, lanes)
    low = builder.zext(_vector(builder, q, _BYTE, index, lanes), wide)
    if bits == 4:
        high = builder.lshr(low, ir.Constant(wide, [4] * lanes))
        low = builder.and_(low, ir.Constant(wide, [15] * lanes))
    else:
        there = builder.add(index, _WORD(half * BLOCK))
        high = builder.zext(_vector(builder, q, _BYTE, there, lanes), wide)
    # Signed: the conversion that processors have.
    return builder.sitofp(low, floats), builder.sitofp(high, floats)


def _scaled(builder: Any, base: Any, index: Any, half: bool, lanes: int) -> Any:
    """Scales or biases as floats."""
    if not half:
        return _vector(builder, base, _FLOAT, index, lanes)
    return builder.fpext(_vector(builder, base, _HALF, index, lanes), ir.VectorType(_FLOAT, lanes))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(a.type, [a.type] * 3), f"llvm.fma.v{a.type.count}f32"
    )
    return builder.call(function, [a, b, c])


@intrinsic(prefer_literal=True)
def _dot(
    _: Any,
    rows: Any,
    bits: Any,
    group: Any,
    half: Any,
    q: Any,
    scales: Any,
    biases: Any,
    x: Any,
    sums: Any,
    out: Any,
    groups: Any,
    by_x: Any,
    by_sums: Any,
    by_out: Any,
) -> Any:
    """`rows` rows times one block of outputs. Takes addresses; groups; row strides, in floats.

    What the code depends on are numbers that are known when it is compiled: so, and not as objects that its caller
    holds, they are part of the name under which Numba keeps the caller's code.
    """
    kinds = (rows, bits, group, half)
    rows, bits, group, half = (kind.literal_value for kind in kinds)
    vector = _lanes()
    # Two chains of sums a row, as many vectors wide as there are registers for.
    lanes = min(BLOCK, vector * max(1, most_rows() // rows))
    if vector == 16 and rows == 4:
        lanes = 32
    middle = group // 2
    unrolled = 16

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        q, scales, biases, x, sums, out, groups, x_stride, sums_stride, out_stride = values[4:]
        floats = ir.VectorType(_FLOAT, lanes)
        x = builder.inttoptr(x, _FLOAT.as_pointer())
        sums = builder.inttoptr(sums, _FLOAT.as_pointer())
        zero = ir.Constant(floats, [0.0] * lanes)
        totals = [cgutils.alloca_once(builder, floats) for _ in range(rows)]
        chains = [[cgutils.alloca_once(builder, floats) for _ in range(2)] for _ in range(rows)]
        x_rows = [builder.gep(x, [builder.mul(x_stride, _WORD(n))]) for n in range(rows)]
        sums_rows = [builder.gep(sums, [builder.mul(sums_stride, _WORD(n))]) for n in range(rows)]
        for first in range(0, BLOCK, lanes):
            for total in totals:
                builder.store(zero, total)
            with cgutils.for_range(builder, groups, intp=_WORD) as over_groups:
                g = over_groups.index
                for pair in chains:
                    for chain in pair:
                        builder.store(zero, chain)
                bytes_at = builder.mul(g, _WORD(group * bits // 8 * BLOCK))
                x_at = builder.mul(g, _WORD(group))
                with cgutils.for_range(builder, _WORD(middle // unrolled), intp=_WORD) as over_parts:
                    start = builder.mul(over_parts.index, _WORD(unrolled))
                    for k in range(unrolled):
                        here = builder.add(start, _WORD(k))
                        index = builder.add(builder.add(bytes_at, builder.mul(here, _WORD(BLOCK))), _WORD(first))
                        weights = _quants(builder, q, index, bits, middle, lanes)
                        for n in range(rows):
                            for side in range(2):
                                at = builder.add(builder.add(x_at, here), _WORD(side * middle))
                                value = _splat(builder, builder.load(builder.gep(x_rows[n], [at])), lanes)
                                chain = chains[n][side]
                                builder.store(_fma(builder, weights[side], value, builder.load(chain)), chain)
                at = builder.add(builder.mul(g, _WORD(BLOCK)), _WORD(first))
                scale = _scaled(builder, scales, at, half, lanes)
                bias = _scaled(builder, biases, at, half, lanes)
                for n in range(rows):
                    both = builder.fadd(builder.load(chains[n][0]), builder.load(chains[n][1]))
                    total = _fma(builder, scale, both, builder.load(totals[n]))
                    value = _splat(builder, builder.load(builder.gep(sums_rows[n], [g])), lanes)
                    builder.store(_fma(builder, bias, value, total), totals[n])
            for n in range(rows):
                at = builder.add(builder.mul(out_stride, _WORD(n)), _WORD(first))
                pointer = builder.gep(builder.inttoptr(out, _FLOAT.as_pointer()), [at])
                stored = builder.store(builder.load(totals[n]), builder.bitcast(pointer, floats.as_pointer()))
                stored.align = 4
        return context.get_dummy_value()

    return types.none(*kinds, *[types.int64] * 10), generate


@intrinsic(prefer_literal=True)
def _widen(_: Any, bits: Any, group: Any, half: Any, q: Any, scales: Any, biases: Any, out: Any, stride: Any) -> Any:
    """One group of a block as floats, as `_dot` by known numbers. Takes addresses, and the row stride of out."""
    kinds = (bits, group, half)
    bits, group, half = (kind.literal_value for kind in kinds)
    middle, lanes = group // 2, BLOCK

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        q, scales, biases, out, stride = values[3:]
        floats = ir.VectorType(_FLOAT, lanes)
        scale = _scaled(builder, scales, _WORD(0), half, lanes)
        bias = _scaled(builder, biases, _WORD(0), half, lanes)
        out = builder.inttoptr(out, _FLOAT.as_pointer())
        with cgutils.for_range(builder, _WORD(middle), intp=_WORD) as over:
            weights = _quants(builder, q, builder.mul(over.index, _WORD(BLOCK)), bits, middle, lanes)
            for side in range(2):
                at = builder.mul(builder.add(over.index, _WORD(side * middle)), stride)
                pointer = builder.bitcast(builder.gep(out, [at]), floats.as_pointer())
                builder.store(_fma(builder, scale, weights[side], bias), pointer).align = 4
        return context.get_dummy_value()

    return types.none(*kinds, *[types.int64] * 5), generate


@intrinsic
def sgemm(
    _: Any, address: Any, turned: Any, m: Any, n: Any, k: Any, a: Any, lda: Any, b: Any, ldb: Any, c: Any, ldc: Any
) -> Any:
    """C = A B, all row by row, by the cblas_sgemm with 64-bit sizes at `address`. turned: 1 for C = A B^T, else 0."""

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        address, turned, m, n, k, a, lda, b, ldb, c, ldc = values
        number, pointer = ir.IntType(32), _FLOAT.as_pointer()
        function = ir.FunctionType(
            ir.VoidType(),
            [number] * 3 + [_WORD] * 3 + [_FLOAT, pointer, _WORD, pointer, _WORD, _FLOAT, pointer, _WORD],
        )
        a, b, c = (builder.inttoptr(value, pointer) for value in (a, b, c))
        # CblasRowMajor; CblasNoTrans, and CblasTrans one after it.
        how = builder.add(number(111), builder.trunc(turned, number))
        given = [number(101), number(111), how, m, n, k, _FLOAT(1.0), a, lda, b, ldb, _FLOAT(0.0), c, ldc]
        builder.call(builder.inttoptr(address, function.as_pointer()), given)
        return context.get_dummy_value()

    return types.none(*[types.int64] * 11), generate


@lru_cache(maxsize=32)
def few(bits: int, group: int, half: bool) -> int:
    """The address of the kernel for few rows: a chunk is a block of outputs. Arguments: see `_ARGUMENTS`."""
    bytes_a_group, bytes_a_scale = group * bits // 8 * BLOCK, (2 if half else 4) * BLOCK
    most, halved = most_rows(), int(half)

    @numba.cfunc(pool.KERNEL, cache=True)
    def multiply(arguments: Any, chunk: int, _thread: int) -> None:
        given = carray(arguments, 16)
        rows, groups = given[6], given[7]
        q = given[0] + chunk * groups * bytes_a_group
        scales = given[1] + chunk * groups * bytes_a_scale
        biases = given[2] + chunk * groups * bytes_a_scale
        x, sums, out = given[3], given[4], given[5] + chunk * BLOCK * 4
        x_stride, sums_stride, out_stride = groups * group, groups, given[8]
        while rows > 0:
            if rows >= most:
                _dot(
                    most,
                    bits,
                    group,
                    halved,
                    q,
                    scales,
                    biases,
                    x,
                    sums,
                    out,
                    groups,
                    x_stride,
                    sums_stride,
                    out_stride,
                )
                done = most
            elif rows >= 4:
                _dot(4, bits, group, halved, q, scales, biases, x, sums, out, groups, x_stride, sums_stride, out_stride)
                done = 4
            elif rows >= 2:
                _dot(2, bits, group, halved, q, scales, biases, x, sums, out, groups, x_stride, sums_stride, out_stride)
                done = 2
            else:
                _dot(1, bits, group, halved, q, scales, biases, x, sums, out, groups, x_stride, sums_stride, out_stride)
                done = 1
            rows -= done
            x += done * x_stride * 4
            sums += done * sums_stride * 4
            out += done * out_stride * 4

    return int(multiply.address)


@lru_cache(maxsize=32)
def many(bits: int, group: int, half: bool) -> int:
    """The address of the kernel for many rows: a chunk is `_WIDE` blocks, made floats in scratch, then BLAS."""
    bytes_a_group, bytes_a_scale = group * bits // 8 * BLOCK, (2 if half else 4) * BLOCK
    halved = int(half)

    @numba.cfunc(pool.KERNEL, cache=True)
    def multiply(arguments: Any, chunk: int, thread: int) -> None:
        given = carray(arguments, 16)
        rows, groups, blocks = given[6], given[7], given[9]
        width = min(_WIDE, blocks - chunk * _WIDE) * BLOCK
        scratch = given[10] + thread * given[11]
        for part in range(width // BLOCK):
            block = chunk * _WIDE + part
            for g in range(groups):
                at = block * groups + g
                _widen(
                    bits,
                    group,
                    halved,
                    given[0] + at * bytes_a_group,
                    given[1] + at * bytes_a_scale,
                    given[2] + at * bytes_a_scale,
                    scratch + (g * group * width + part * BLOCK) * 4,
                    width,
                )
        out = given[5] + chunk * _WIDE * BLOCK * 4
        inputs = groups * group
        sgemm(given[12], 0, rows, width, inputs, given[3], inputs, scratch, width, out, given[8])

    return int(multiply.address)


@numba.njit(inline="always")
def at(array: Any) -> Any:
    """An array's address, signed: Numba makes a float of signed plus unsigned."""
    return np.int64(array.ctypes.data)


@numba.njit(nogil=True, cache=True, fastmath={"reassoc"})
def _sums(x: Floats, group: int) -> Floats:
    """Each row's sum over each group of inputs: what biases are multiplied by. [N, groups]."""
    rows, inputs = x.shape
    sums = np.empty((rows, inputs // group), dtype=np.float32)
    for n in range(rows):
        for g in range(inputs // group):
            total = _F32(0)
            for k in range(g * group, (g + 1) * group):
                total += x[n, k]
            sums[n, g] = total
    return sums


@numba.njit(nogil=True, cache=True)
def product(
    words: int,
    kernel: int,
    q: Any,
    scales: Any,
    biases: Any,
    x: Floats,
    out: Floats,
    group: int,
    gemm: int,
    scratch: Any,
) -> None:
    """out[:, :] = x times the weights. gemm: the address of sgemm, for the kernel for many rows; else 0.

    q: [blocks, groups, bytes, BLOCK]. x: [N, I]. out: [N, blocks * BLOCK]. scratch: [threads, floats].
    """
    rows = x.shape[0]
    blocks, groups = q.shape[0], q.shape[1]
    sums = _sums(x[: rows if gemm == 0 else 0], group)
    given = np.empty(16, dtype=np.int64)
    given[0], given[1], given[2] = at(q), at(scales), at(biases)
    given[3], given[4], given[5] = at(x), at(sums), at(out)
    given[6], given[7], given[8], given[9] = rows, groups, out.strides[0] // 4, blocks
    given[10], given[11], given[12] = at(scratch), scratch.strides[0], gemm
    pool.run(words, kernel, at(given), blocks if gemm == 0 else (blocks + _WIDE - 1) // _WIDE)


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract"}, error_model="numpy")
def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """Each row divided by its root mean square, times `weight`. x: [N, D]."""
    out = np.empty_like(x)
    rows, width = x.shape
    for n in range(rows):
        total = _F32(0)
        for k in range(width):
            total += x[n, k] * x[n, k]
        scale = _F32(1 / np.sqrt(total / _F32(width) + _F32(eps)))
        for k in range(width):
            out[n, k] = x[n, k] * scale * weight[k]
    return out


@numba.njit(nogil=True, cache=True, fastmath={"contract"})
def rotate(x: Any, cos: Floats, sin: Floats, traditional: bool) -> Floats:
    """Rope. x: [B, H, L, D]. cos, sin: [B or 1, L, d / 2] for the first d of D. traditional: pairs lie side by side."""
    batch, heads, count, width = x.shape
    half = cos.shape[2]
    out = np.empty((batch, heads, count, width), dtype=np.float32)
    for b in range(batch):
        at = b if cos.shape[0] > 1 else 0
        for h in range(heads):
            for i in range(count):
                for k in range(half):
                    first, second = (2 * k, 2 * k + 1) if traditional else (k, k + half)
                    c, s = cos[at, i, k], sin[at, i, k]
                    one, two = x[b, h, i, first], x[b, h, i, second]
                    out[b, h, i, first] = one * c - two * s
                    out[b, h, i, second] = one * s + two * c
                for k in range(2 * half, width):
                    out[b, h, i, k] = x[b, h, i, k]
    return out


@intrinsic
def floats_at(_: Any, address: Any) -> Any:
    """The address as a pointer to floats."""

    def generate(_: Any, builder: Any, __: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], _FLOAT.as_pointer())

    return types.CPointer(types.float32)(types.int64), generate


@intrinsic
def _as_float(_: Any, bits: Any) -> Any:
    """A float's bits as that float."""

    def generate(_: Any, builder: Any, __: Any, values: Any) -> Any:
        return builder.bitcast(values[0], _FLOAT)

    return types.float32(types.int32), generate


@numba.njit(inline="always")
def exp(x: Any) -> Any:
    """e to the x within 2e-7 of it, for x from -87 to 88, and at the border beyond: a loop of these becomes vectors.

    Cephes's polynomial; the C library's function, which Numba would call, is called number by number.
    """
    x = min(max(x, _F32(-87)), _F32(88))
    n = np.floor(x * _F32(1.4426950408889634) + _F32(0.5))
    f = x - n * _F32(0.693359375) + n * _F32(2.12194440e-4)
    y = _F32(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = y * f + _F32(c)
    y = y * f * f + f + _F32(1)
    return y * _as_float((np.int32(n) + np.int32(127)) << np.int32(23))


@lru_cache(maxsize=1)
def _swiglu_kernel() -> int:
    @numba.cfunc(pool.KERNEL, cache=True, fastmath={"contract"}, error_model="numpy")
    def swiglu_rows(arguments: Any, chunk: int, _thread: int) -> None:
        given = carray(arguments, 8)
        width = given[3]
        for n in range(chunk * given[7], min((chunk + 1) * given[7], given[6])):
            gate = carray(floats_at(given[0] + n * given[4]), width)
            up = carray(floats_at(given[1] + n * given[5]), width)
            out = carray(floats_at(given[2] + n * width * 4), width)
            for k in range(width):
                out[k] = gate[k] / (_F32(1) + exp(-gate[k])) * up[k]

    return int(swiglu_rows.address)


@numba.njit(nogil=True, cache=True)
def _swiglu(words: int, kernel: int, gate: Any, up: Any, out: Floats, together: int) -> None:
    given = np.empty(8, dtype=np.int64)
    given[0], given[1], given[2], given[3] = at(gate), at(up), at(out), out.shape[1]
    given[4], given[5], given[6], given[7] = gate.strides[0], up.strides[0], out.shape[0], together
    pool.run(words, kernel, at(given), (out.shape[0] + together - 1) // together)


def swiglu(gate: Floats, up: Floats) -> Floats:
    """silu(gate) * up, [N, D] each; rows may lie apart."""
    out = np.empty(gate.shape, dtype=np.float32)
    shared = pool.shared()
    with shared.lock:
        _swiglu(shared.words, _swiglu_kernel(), gate, up, out, max(1, 8192 // gate.shape[1]))
    return out


# The border between the two kernels for products, in rows: measured by `tests.benchmarks.kernels`.
MANY = 48


class Table:
    """A quantised matrix, packed for the kernels: outputs by inputs.

    q: [blocks, groups, bytes, BLOCK] uint8: byte k holds weights k and k + group / 2 (4 bits), or weight k (8 bits), of
    BLOCK outputs. scales, biases: [blocks, groups, BLOCK] float16 or float32. outputs: without those that fill the last
    block.
    """

    def __init__(self, q: Any, scales: Any, biases: Any, *, bits: int, group: int, outputs: int) -> None:
        self.q, self.scales, self.biases = q, scales, biases
        self.bits, self.group, self.outputs = bits, group, outputs
        self.inputs = q.shape[1] * group
        self._half = scales.dtype == np.float16
        self._raw = (scales.view(np.uint16), biases.view(np.uint16)) if self._half else (scales, biases)

    @property
    def kind(self) -> tuple[int, int, bool]:
        """What its kernels depend on: bits, group, and whether scales are of 16 bits."""
        return self.bits, self.group, self._half

    @property
    def arrays(self) -> tuple[Any, Any, Any]:
        """Weights, scales and biases."""
        return self.q, self.scales, self.biases

    def times(self, x: Floats) -> Floats:
        """x times the matrix's transpose: [N, outputs]. x: [N, inputs], contiguous."""
        out = np.empty((len(x), self.q.shape[0] * BLOCK), dtype=np.float32)
        address = gemm() if len(x) >= MANY else 0
        kernel = (many if address else few)(*self.kind)
        shared = pool.shared()
        with shared.lock:
            scratch = shared.scratch(self.inputs * _WIDE * BLOCK if address else 0)
            product(shared.words, kernel, self.q, *self._raw, x, out, self.group, address, scratch)
        return out[:, : self.outputs]

    def rows(self, index: npt.NDArray[np.integer[Any]]) -> Floats:
        """The matrix's rows of `index`: [*index.shape, inputs]."""
        block, lane = np.divmod(index, BLOCK)
        q = self.q[block, :, :, lane]
        if self.bits == 4:
            q = np.concatenate([q & 15, q >> 4], axis=-1)
        scales, biases = (array[block, :, lane].astype(np.float32) for array in (self.scales, self.biases))
        rows: Floats = q * scales[..., None] + biases[..., None]
        return rows.reshape(*index.shape, self.inputs)


@lru_cache(maxsize=1)
def gemm() -> int:
    """The address of NumPy's sgemm; 0 where there is none to be found, and the other kernel serves all."""
    return blas.numpy_sgemm()


def pack(weight: Any, scales: Any, biases: Any, *, bits: int, group: int) -> Table:
    """From MLX's arrays as NumPy's. weight: [O, I * bits / 32] uint32. scales, biases: [O, I / group].

    Raises ValueError for other bits and groups, and for scales and biases that are not finite.
    """
    if bits not in (4, 8) or group not in (32, 64, 128):
        raise ValueError(f"no kernel for {bits} bits in groups of {group}")
    if not (np.isfinite(scales).all() and np.isfinite(biases).all()):
        raise ValueError("its scales or biases are not finite")
    outputs, groups = scales.shape
    blocks = -(-outputs // BLOCK)
    raw = np.zeros((blocks * BLOCK, groups, group * bits // 8), dtype=np.uint8)
    raw[:outputs] = np.ascontiguousarray(weight).view(np.uint8).reshape(outputs, groups, -1)
    if bits == 4:
        # MLX's byte k holds weights 2k and 2k + 1.
        low, high = raw & 15, raw >> 4
        order = np.stack([low, high], axis=-1).reshape(*raw.shape[:2], group)
        raw = order[..., : group // 2] | (order[..., group // 2 :] << 4)
    q = np.ascontiguousarray(raw.reshape(blocks, BLOCK, groups, -1).transpose(0, 2, 3, 1))

    def laid(array: Any) -> Any:
        filled = np.zeros((blocks * BLOCK, groups), dtype=np.float16 if array.dtype == np.float16 else np.float32)
        filled[:outputs] = array
        return np.ascontiguousarray(filled.reshape(blocks, BLOCK, groups).transpose(0, 2, 1))

    return Table(q, laid(scales), laid(biases), bits=bits, group=group, outputs=outputs)
