"""MoonViT-3D: how K3 sees. One transformer for pictures and clips of any size, and a bridge into the text.

A media item is a grid of t frames, h rows and w columns of 14 x 14 pixels. Each patch becomes a vector,

    x = W_patch pixels + table(h, w) [+ sinusoid(frame) where t > 1]

then runs through pre-norm blocks in which every patch of the item attends to every other, frames included,

    x += W_o softmax(q k^T / sqrt(K)) v        q, k turned by column and row (2D RoPE)
    x += W_1 gelu_tanh(W_0 norm(x))

and at the end each 2 x 2 neighbourhood, averaged over the frames, becomes one row of four vectors. The
projector makes it one text embedding: `norm(P_2 gelu_erf(P_0 row))`. An item gives h/2 * w/2 rows, however
many frames it has.

Items of any mix of sizes lie one after the other in the same tensor, without padding: everything works patch
by patch except attention, which walks over the lengths of items, all of one length at once, and needs memory
linear in the patches.

Source: the official modeling_kimi_k3.py, to whose numbers the tests hold this file (specification 3.9). Where
the report speaks of factorized space and time attention, the released code attends jointly; so does this
file. How the weights begin is ours (`Matrix`, `Learned`, `Bridge`); the release was not trained from them here.

Legend: N patches of all items together, P patch side, D tower width, H heads, K head width.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, groupby

import torch
import torch.nn.functional as F
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn

from nanok3.config import K3Config
from nanok3.model.basics import Linear, RMSNorm, at_least_float32, linear

Grid = tuple[int, int, int]
"""Frames, rows and columns of one item, in patches."""

BASE = 10000.0
"""Of both sinusoids, time and rotation; the config has no field for it."""

# ---------------------------------------------------------------------- grids


def read_grids(grid_thw: Tensor, patches: int, merge: tuple[int, int], frames: int) -> list[Grid]:
    """The grids as numbers. ValueError where the tensor is not whole numbers (items, 3), where a grid cannot
    be merged or encoded, or where all together are not the patches at hand."""
    if grid_thw.dim() != 2 or grid_thw.shape[1] != 3 or grid_thw.is_floating_point():
        raise ValueError(
            f"grid_thw is {grid_thw.dtype} of shape {tuple(grid_thw.shape)}; "
            "it must be whole numbers of shape (items, 3), a row t, h, w for each item"
        )
    grids = [(t, h, w) for t, h, w in grid_thw.tolist()]
    for item, (t, h, w) in enumerate(grids):
        if not 1 <= t <= frames:
            raise ValueError(f"grid_thw[{item}] has t = {t} frames; allowed: 1 to {frames} (init_pos_emb_time)")
        if min(h, w) < 1 or h % merge[0] or w % merge[1]:
            raise ValueError(
                f"grid_thw[{item}] is {h} x {w} patches; rows and columns must be multiples of "
                f"{merge[0]} and {merge[1]} (merge_kernel_size), at least one of each"
            )
    total = sum(t * h * w for t, h, w in grids)
    if not grids or total != patches:
        raise ValueError(
            f"grid_thw describes {len(grids)} items of {total} patches in all, pixel_values holds {patches}"
        )
    return grids


def rows_per_item(grid_thw: Int[Tensor, "items 3"], merge: tuple[int, int]) -> list[int]:
    """How many feature rows each item gives. The frames do not count: they are averaged."""
    return [(h // merge[0]) * (w // merge[1]) for _, h, w in grid_thw.tolist()]


def for_every_item(grids: list[Grid], make: Callable[[Grid], Tensor]) -> Tensor:
    """Concatenate what `make` gives for each item, calling it once for each distinct grid."""
    made = {grid: make(grid) for grid in dict.fromkeys(grids)}
    return torch.cat([made[grid] for grid in grids])


# ---------------------------------------------------------------------- where a patch is, in its embedding


def resize_table(table: Float[Tensor, "R C D"], height: int, width: int) -> Float[Tensor, "h w D"]:
    """Stretch the learned table to a grid: bilinear, half-pixel centres, borders clamped. Nothing is smoothed
    when the grid is smaller than the table. A grid of the table's own size takes it as it is."""
    if table.shape[:2] == (height, width):
        return table
    channels_first = at_least_float32(table).permute(2, 0, 1)[None]
    resized = F.interpolate(channels_first, size=(height, width), mode="bilinear", align_corners=False)
    return resized[0].permute(1, 2, 0).to(table.dtype)


def frame_sinusoid(frames: int, width: int, like: Tensor) -> Float[Tensor, "t D"]:
    """[sin(tau w_k) | cos(tau w_k)] for frame tau, w_k = 10000^(-k / (D/2)); device and dtype of `like`."""
    half = torch.arange(width // 2, device=like.device, dtype=like.dtype)
    frame = torch.arange(frames, device=like.device, dtype=like.dtype)
    angle = frame[:, None] * BASE ** (-half / (width // 2))
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def positions(table: Float[Tensor, "R C D"], grid: Grid) -> Float[Tensor, "n D"]:
    """What is added to the patches of one item, frame by frame, row by row. A single frame gets no time at
    all: frame 0 of a clip does add something, cos 0 = 1."""
    t, h, w = grid
    place = resize_table(table, h, w).flatten(0, 1)
    if t == 1:
        return place
    time = frame_sinusoid(t, table.shape[-1], at_least_float32(table))
    return (place + time[:, None]).flatten(0, 1)


# ---------------------------------------------------------------------- where a patch is, in its attention


def turns(grid: Grid, head_width: int, like: Tensor) -> Complex[Tensor, "n pairs"]:
    """The rotation of each pair of channels for the patches of one item: pair 2m turns by column * th_m, pair
    2m + 1 by row * th_m, th_m = 10000^(-4m / K). Time does not rotate. At least float32, on `like`'s device."""
    t, h, w = grid
    exact = at_least_float32(like.new_empty(0))
    theta = BASE ** (-torch.arange(0, head_width, 4, device=exact.device, dtype=exact.dtype) / head_width)
    row = torch.arange(h, device=exact.device, dtype=exact.dtype)[:, None, None] * theta
    column = torch.arange(w, device=exact.device, dtype=exact.dtype)[None, :, None] * theta
    angle = torch.stack(torch.broadcast_tensors(column, row), dim=-1).flatten(2).flatten(0, 1).repeat(t, 1)
    return torch.polar(torch.ones_like(angle), angle)


def rotate(x: Float[Tensor, "N H K"], turn: Complex[Tensor, "N pairs"]) -> Float[Tensor, "N H K"]:
    """Turn each pair of *adjacent* channels, (0, 1), (2, 3), ..., as one complex number."""
    pairs = torch.view_as_complex(at_least_float32(x).unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn[:, None]).flatten(-2).to(x.dtype)


def attention_reference(
    qkv: Float[Tensor, "N 3 H K"], turn: Complex[Tensor, "N pairs"], lengths: list[int]
) -> Float[Tensor, "N H K"]:
    """Softmax attention within each item, in both directions over space and time, scale K^-1/2. Neighbours of equal
    length go through it together."""
    q, k = rotate(qkv[:, :2].flatten(1, 2), turn).unflatten(1, (2, -1)).unbind(1)
    runs = [(length, len(list(equal))) for length, equal in groupby(lengths)]
    parts = zip(*(x.split([length * count for length, count in runs]) for x in (q, k, qkv[:, 2])), strict=True)
    mixed = []
    for (length, _), part in zip(runs, parts, strict=True):
        items = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in part)
        mixed.append(F.scaled_dot_product_attention(*items).transpose(1, 2).flatten(0, 1))
    return torch.cat(mixed)


def attention(
    qkv: Float[Tensor, "N 3 H K"], turn: Complex[Tensor, "N pairs"], lengths: list[int]
) -> Float[Tensor, "N H K"]:
    """The same, on a CPU in C++, straight from qkv."""
    from nanok3.kernels import vision_cpu

    o = vision_cpu.attention(qkv, turn, lengths)
    return attention_reference(qkv, turn, lengths) if o is NotImplemented else o


def by_size(grids: list[Grid]) -> tuple[list[int], Int[Tensor, " N"] | None]:
    """The order of items that puts equal lengths, and among them equal grids, side by side, and the patches in that
    order; None where it is the order they are in."""
    lengths = [t * h * w for t, h, w in grids]
    order = sorted(range(len(grids)), key=lambda item: (lengths[item], grids[item]))
    if order == list(range(len(grids))):
        return order, None
    starts = [0, *accumulate(lengths)]
    return order, torch.cat([torch.arange(starts[item], starts[item + 1]) for item in order])


# ---------------------------------------------------------------------- from patches to rows


def merge_patches(x: Float[Tensor, "N D"], grid: Grid, merge: tuple[int, int]) -> Float[Tensor, "rows merged"]:
    """Average items of one grid over their frames and lay each 2 x 2 neighbourhood side by side, row by row."""
    t, h, w = grid
    (down, across), width = merge, x.shape[-1]
    x = x.view(-1, t, h // down, down, w // across, across, width).mean(dim=1)
    return x.transpose(2, 3).reshape(-1, down * across * width)


def merge_items(
    x: Float[Tensor, "N D"], grids: list[Grid], merge: tuple[int, int]
) -> list[Float[Tensor, "rows merged"]]:
    """The rows of each item. Neighbours of one grid are merged together."""
    runs = [(grid, len(list(equal))) for grid, equal in groupby(grids)]
    pieces = x.split([t * h * w * count for (t, h, w), count in runs])
    merged = (merge_patches(piece, grid, merge) for piece, (grid, _) in zip(pieces, runs, strict=True))
    return [item for rows, (_, count) in zip(merged, runs, strict=True) for item in rows.chunk(count)]


# ---------------------------------------------------------------------- modules, named as in the checkpoint


class Learned(nn.Module):
    """A learned tensor that its owner reads; a module only to bear the official name `<owner>.weight`. A table begins
    with the given deviation, a filter of `inputs` numbers as a `Matrix` does."""

    def __init__(self, *shape: int, inputs: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))
        self.inputs = inputs

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.weight, std=self.inputs**-0.5 if self.inputs else std)


class Matrix(Linear):
    """Begins with deviation inputs^-1/2, whatever the text's is, so that what goes in with size 1 comes out with size
    1. With 0.02, at home in a width of 2,500, a block 64 wide adds a tenth to its stream, and the tower is little more
    than its patch embedding."""

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)


class Bridge(RMSNorm):
    """The norm before the text. It begins with the deviation of the text's embeddings, not at 1: rows fifty times as
    large the text learned to pass over, unless it learned very slowly (docs/log.md)."""

    def reset_parameters(self, std: float) -> None:
        nn.init.constant_(self.weight, std)


def initialize(module: nn.Module, std: float) -> None:
    """What each part says of itself, given the deviation of the text's weights."""
    for part in module.modules():
        if isinstance(part, Learned | Linear | RMSNorm):
            part.reset_parameters(std)


class PatchEmbed(nn.Module):
    """Pixels and place of a patch. The official convolution with stride = kernel is this matrix product."""

    def __init__(self, width: int, patch: int, table: tuple[int, int]) -> None:
        super().__init__()
        self.proj = Learned(width, 3, patch, patch, inputs=3 * patch * patch)
        # A tenth of what the patches become. Drawn as large as these, the table tells every size of picture another
        # story of noise, and forms are not found (docs/vision.md).
        self.pos_emb = Learned(*table, width, inputs=100)

    def forward(self, pixel_values: Float[Tensor, "N 3 P P"], grids: list[Grid]) -> Float[Tensor, "N D"]:
        x = linear(pixel_values.flatten(1), self.proj.weight.to(pixel_values.dtype).flatten(1))
        return x + for_every_item(grids, lambda grid: positions(self.pos_emb.weight, grid)).to(x.dtype)


def gelu(x: Float[Tensor, "*b f"]) -> Float[Tensor, "*b f"]:
    """x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, on a CPU in C++."""
    from nanok3.kernels import vision_cpu

    y = vision_cpu.gelu_tanh(x)
    return F.gelu(x, approximate="tanh") if y is NotImplemented else y


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc0 = Matrix(width, inner)
        self.fc1 = Matrix(inner, width)

    def forward(self, x: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        return self.fc1(gelu(self.fc0(x)))


class Block(nn.Module):
    """Attention over the item, then an MLP, each on the normed stream and added to it."""

    def __init__(self, width: int, heads: int, qkv_width: int, inner: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm0 = RMSNorm(width, eps)
        self.wqkv = Matrix(width, 3 * qkv_width)
        self.wo = Matrix(qkv_width, width)
        self.norm1 = RMSNorm(width, eps)
        self.mlp = MLP(width, inner)

    def forward(
        self, x: Float[Tensor, "N D"], turn: Complex[Tensor, "N pairs"], lengths: list[int]
    ) -> Float[Tensor, "N D"]:
        qkv = self.wqkv(self.norm0(x)).unflatten(-1, (3, self.heads, -1))
        x = x + self.wo(attention(qkv, turn, lengths).flatten(1))
        return x + self.mlp(self.norm1(x))


class Encoder(nn.Module):
    def __init__(self, blocks: list[Block], width: int, eps: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.final_layernorm = RMSNorm(width, eps)

    def forward(
        self, x: Float[Tensor, "N D"], turn: Complex[Tensor, "N pairs"], lengths: list[int]
    ) -> Float[Tensor, "N D"]:
        for block in self.blocks:
            x = block(x, turn, lengths)
        return self.final_layernorm(x)


class MoonViT(nn.Module):
    """The tower: `vision_tower.*` of the checkpoint."""

    def __init__(self, cfg: K3Config) -> None:
        super().__init__()
        assert cfg.vt_hidden_size and cfg.vt_num_attention_heads and cfg.qkv_hidden_size and cfg.patch_size
        assert cfg.vt_num_hidden_layers and cfg.vt_intermediate_size and cfg.merge_kernel_size
        assert cfg.init_pos_emb_height and cfg.init_pos_emb_width and cfg.init_pos_emb_time
        width, heads, eps = cfg.vt_hidden_size, cfg.vt_num_attention_heads, cfg.vision_norm_eps
        if width % 2:
            raise ValueError(f"field 'vt_hidden_size' is {width}; it must be even (a sine and a cosine for the time)")
        self.head_width = cfg.qkv_hidden_size // heads
        self.merge = cfg.merge_kernel_size
        self.frames = cfg.init_pos_emb_time
        self.patch_embed = PatchEmbed(width, cfg.patch_size, (cfg.init_pos_emb_height, cfg.init_pos_emb_width))
        blocks = [
            Block(width, heads, cfg.qkv_hidden_size, cfg.vt_intermediate_size, eps)
            for _ in range(cfg.vt_num_hidden_layers)
        ]
        self.encoder = Encoder(blocks, width, eps)
        initialize(self, cfg.initializer_range)

    def forward(
        self, pixel_values: Float[Tensor, "N 3 P P"], grid_thw: Int[Tensor, "items 3"]
    ) -> Float[Tensor, "rows merged"]:
        """Patches of all items, normalized pixels, to rows of four merged patches. Works in the dtype of
        `pixel_values` (rotation and norms in at least float32), so cast them to the dtype you want to compute
        in.

        ValueError: a grid that cannot be merged, more frames than the time table knows, or grids that do not
        add up to N patches of this model's size.
        """
        expected = self.patch_embed.proj.weight.shape[1:]
        if pixel_values.shape[1:] != expected:
            raise ValueError(f"pixel_values has patches of {tuple(pixel_values.shape[1:])}; expected {tuple(expected)}")
        grids = read_grids(grid_thw, len(pixel_values), self.merge, self.frames)
        order, patches = by_size(grids)
        if patches is not None:
            pixel_values, grids = pixel_values[patches.to(pixel_values.device)], [grids[item] for item in order]
        lengths = [t * h * w for t, h, w in grids]
        x = self.patch_embed(pixel_values, grids)
        turn = for_every_item(grids, lambda grid: turns(grid, self.head_width, x))
        rows = merge_items(self.encoder(x, turn, lengths), grids, self.merge)
        placed = dict(zip(order, rows, strict=True))
        return torch.cat([placed[item] for item in range(len(rows))])


class Projector(nn.Module):
    """From merged patches to text embeddings: `mm_projector.*` of the checkpoint. Its GELU is exact."""

    def __init__(self, cfg: K3Config) -> None:
        super().__init__()
        assert cfg.mm_hidden_size and cfg.merge_kernel_size and cfg.text_hidden_size and cfg.projector_ln_eps
        merged = cfg.mm_hidden_size * cfg.merge_kernel_size[0] * cfg.merge_kernel_size[1]
        self.proj = nn.Sequential(Matrix(merged, merged), nn.GELU(), Matrix(merged, cfg.text_hidden_size))
        self.post_norm = Bridge(cfg.text_hidden_size, cfg.projector_ln_eps)
        initialize(self, cfg.initializer_range)

    def forward(self, merged: Float[Tensor, "rows merged"]) -> Float[Tensor, "rows text"]:
        return self.post_norm(self.proj(merged))
