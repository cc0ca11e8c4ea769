"""Matrix products with weights, as parts of NKI kernels.

Weights are [I, O], the transpose of a checkpoint's: the contraction runs over partitions. The I rows of a weight are
`lanes` x C: "lane-major", row p * C + c belongs to partition p, so that a partition reads neighbouring rows in one
piece; or "chunk-major", row c * lanes + p does.
"""

import nki.isa as nisa
import nki.language as nl

from vllm_neuron.kernels.tiling import BANK, PARTITIONS

BLOCK_TOKENS = 512
"""Tokens that weights are streamed for at most; half of them in float32, where everything is twice as large."""
LOAD_BYTES = 8192
"""Bytes per partition of a load of weights at most: whole descriptors, and a start before everything is there."""
GROUP_BYTES = 57344
"""Bytes per partition of the weights of a group of columns."""
RESIDENT_BYTES = 65536
"""Bytes per partition of weights that stay in SBUF for all tokens."""
ACCUMULATORS = 4
"""Banks of PSUM that a group of columns accumulates in: half of them, so that two groups overlap."""
WHOLE_CHUNKS = 64
"""Tokens from which on a chunk is an instruction's work: the Vector Engine reads 16-bit PSUM twice as fast by a factor
per partition as by a factor per element, and the Scalar Engine takes a third."""
CHUNKS = 64
"""Chunks of a contraction at most: with a block of tokens that is 64 KiB of a partition."""


def item_bytes(tensor):
    """Bytes of an element, of the types that the kernels take."""
    return 4 if tensor.dtype == nl.float32 else 2


def block_tokens(tensor):
    """Tokens of a block."""
    return BLOCK_TOKENS * 2 // item_bytes(tensor)


def transpose_rows(dst, rows, lanes, gamma=None):
    """dst [lanes, C, T] = rows [T, lanes * C] transposed, lane-major, times `gamma` [lanes, C] (float32) if given."""
    tokens, width = rows.shape
    chunks = width // lanes
    # A transpose stays within a bank of PSUM, in the type of its input.
    group = min(chunks, BANK * 4 // (tokens * item_bytes(rows)))
    for number in nl.affine_range((chunks + group - 1) // group):
        few = min(group, chunks - number * group)
        turned = nl.ndarray((lanes, few, tokens), rows.dtype, buffer=nl.psum)
        for chunk in nl.affine_range(few):
            nisa.nc_transpose(
                dst=turned[:, chunk], data=rows[:, number * group + chunk : width : chunks], engine=nisa.engine.tensor
            )
        target = dst[:, nl.ds(number * group, few)]
        if gamma == None:  # noqa: E711
            nisa.tensor_copy(dst=target, src=turned, engine=nisa.engine.vector)
        elif tokens >= WHOLE_CHUNKS:
            for chunk in nl.affine_range(few):
                factor = gamma[:, nl.ds(number * group + chunk, 1)]
                if chunk % 3 == 2:
                    nisa.activation(dst=target[:, chunk], op=nl.copy, data=turned[:, chunk], scale=factor)
                else:
                    nisa.tensor_scalar(dst=target[:, chunk], data=turned[:, chunk], op0=nl.multiply, operand0=factor)
        else:
            scale = gamma.ap(pattern=[[chunks, lanes], [1, few], [0, tokens]], offset=number * group)
            nisa.tensor_tensor(dst=target, data1=turned, data2=scale, op=nl.multiply)


def load_weight(weight, lanes, lane_major, chunk, chunks, column, columns):
    """Some chunks of some columns of a weight, as [lanes, chunks, columns] in SBUF."""
    inputs, outputs = weight.shape
    lane_step = inputs // lanes if lane_major else 1
    chunk_step = 1 if lane_major else lanes
    tile = nl.ndarray((lanes, chunks, columns), weight.dtype)
    pattern = [[lane_step * outputs, lanes], [chunk_step * outputs, chunks], [1, columns]]
    nisa.dma_copy(dst=tile, src=weight.ap(pattern=pattern, offset=chunk * chunk_step * outputs + column))
    return tile


def chunks_per_load(weight, lanes, columns):
    """Chunks of so many columns that one load moves."""
    return max(1, min(weight.shape[0] // lanes, LOAD_BYTES // (columns * item_bytes(weight))))


def load_columns(weight, lanes, lane_major, column, columns):
    """All chunks of some columns of a weight, as a list of loads."""
    chunks = weight.shape[0] // lanes
    step = chunks_per_load(weight, lanes, columns)
    parts = []
    for number in nl.affine_range((chunks + step - 1) // step):
        chunk = number * step
        parts.append(load_weight(weight, lanes, lane_major, chunk, min(step, chunks - chunk), column, columns))
    return parts


def group_columns(weight, lanes, tokens, tile):
    """Columns that are accumulated at a time for so many tokens, a multiple of `tile` unless they are all."""
    height = (tokens + PARTITIONS - 1) // PARTITIONS
    room = GROUP_BYTES // (weight.shape[0] // lanes * item_bytes(weight))
    if weight.shape[1] <= min(room, ACCUMULATORS // height * tile):
        return weight.shape[1]
    return min(weight.shape[1], max(1, min(ACCUMULATORS // height, room // tile)) * tile)


def multiply(left, parts, tokens, tile):
    """left [lanes, C, tokens] transposed times the weights of `parts`, in PSUM.

    Returns:
        float32 [128, token tiles x column tiles, 512]: tokens t * 128 + p, columns j * `tile` and on are
        [p, t * column tiles + j].
    """
    columns = parts[0].shape[2]
    wide = (columns + tile - 1) // tile
    height = (tokens + PARTITIONS - 1) // PARTITIONS
    sums = nl.ndarray((min(tokens, PARTITIONS), height * wide, BANK), nl.float32, buffer=nl.psum)
    chunk = 0
    for part in parts:
        for number in nl.affine_range(part.shape[1]):
            for t in nl.affine_range(height):
                rows = min(PARTITIONS, tokens - t * PARTITIONS)
                for j in nl.affine_range(wide):
                    width = min(tile, columns - j * tile)
                    nisa.nc_matmul(
                        dst=sums[0:rows, t * wide + j, 0:width],
                        stationary=left[:, chunk, nl.ds(t * PARTITIONS, rows)],
                        moving=part[:, number, nl.ds(j * tile, width)],
                        accumulate=chunk > 0,
                    )
            chunk += 1
    return sums


def store_product(out, sums, token, tokens, column, columns):
    """Write the product that `multiply` left in PSUM, with tiles of 512 columns, to out [T, O] in HBM."""
    wide = (columns + BANK - 1) // BANK
    for t in nl.affine_range((tokens + PARTITIONS - 1) // PARTITIONS):
        rows = min(PARTITIONS, tokens - t * PARTITIONS)
        tile = nl.ndarray((rows, columns), out.dtype)
        for j in nl.affine_range(wide):
            width = min(BANK, columns - j * BANK)
            # Both engines that read PSUM share the work.
            engine = nisa.engine.scalar if (t + j) % 2 == 0 else nisa.engine.vector
            nisa.tensor_copy(
                dst=tile[:, nl.ds(j * BANK, width)], src=sums[0:rows, t * wide + j, 0:width], engine=engine
            )
        nisa.dma_copy(dst=out[nl.ds(token + t * PARTITIONS, rows), nl.ds(column, columns)], src=tile)
