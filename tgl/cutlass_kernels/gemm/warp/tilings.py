"""Which tilings of MMAs by warps there are, and which suits a problem; plain Python. Nothing was measured yet."""

from __future__ import annotations

from ...config import GemmConfig

WARPS = {
    (64, 64): (2, 2),
    (64, 128): (2, 2),
    (128, 64): (2, 2),
    (128, 128): (4, 2),
    (128, 256): (2, 4),
    (256, 128): (4, 2),
}
"""By rows and columns of a tile: warps down and across. One has at most 64 x 64: half of its registers hold sums. From
128 columns on it has 64, so that it stores whole chunks of gate and linear half."""

RESERVED = 3 * 1024  # bytes beside the ring: at most what the order of tiles takes, and the ring's alignment
FEWEST, MOST = 2, 5  # stages


def stage_bytes(tiling: GemmConfig) -> int:
    """Shared memory of one stage of the ring."""
    return (tiling.tile_m + tiling.tile_n) * tiling.tile_k * 2


def _beside_sums(what: str, tiling: GemmConfig) -> str | None:
    """Why a thread has no registers for something, or None."""
    large = tiling.tile_m * tiling.tile_n > 128 * 128
    return f"{what} do not fit its registers beside 64 x 64 sums of its warp" if large else None


def gathering_reason(tiling: GemmConfig) -> str | None:
    """What else rules a tiling out for kernels that gather rows of an operand."""
    return _beside_sums("the rows that a thread gathers", tiling)


def gradient_reason(tiling: GemmConfig) -> str | None:
    """What else rules a tiling out for kernels that go back through the activation."""
    return _beside_sums("what a thread reads and writes of an activation's input", tiling)


class Tilings:
    """The tilings of an architecture.

    Attributes:
        SMEM_BYTES: shared memory that a CTA may have.
    """

    def __init__(self, smem_bytes: int) -> None:
        self.SMEM_BYTES = smem_bytes

    def stages(self, tiling: GemmConfig) -> int:
        """As many stages as there is room for, up to those that are of use."""
        return min((self.SMEM_BYTES - RESERVED) // stage_bytes(tiling), MOST)

    def reason(self, kind: str, tiling: GemmConfig, bits: int) -> str | None:
        """None if there is a kernel of ``tiling`` on elements of ``bits``, else why not."""
        shape = tiling.tile_m, tiling.tile_n
        if bits != 16:
            return f"MMAs of warps take 16-bit elements, not {bits}-bit ones"
        if tiling.two_cta or tiling.pingpong or tiling.ctas > 1:
            return "warps that issue MMAs share a tile with their own CTA alone, neither in turns nor in clusters"
        if shape not in WARPS:
            return f"tiles are {', '.join(f'{m} x {n}' for m, n in WARPS)}, not {shape[0]} x {shape[1]}"
        if not FEWEST <= tiling.stages <= self.stages(tiling):
            return f"stages must be {FEWEST} to {self.stages(tiling)}, which is what fits, not {tiling.stages}"
        return None

    def sum_columns(self, tiling: GemmConfig) -> int:
        """Columns whose products a kernel that goes back through the activation adds up to a row's sum: a warp's."""
        return tiling.tile_n // WARPS[tiling.tile_m, tiling.tile_n][1]

    def choose(self, kind: str, columns: int, depth: int, rows: int) -> GemmConfig:
        """128 x 128 tiles where rows and columns fill them, 128 x 256 where shared memory holds 3 stages of those.

        A larger tile reads fewer bytes per MMA from shared memory and through L2; with fewer than 3 stages nothing
        would be on its way while a stage is multiplied.
        """
        tile_m, tile_n = 64 if rows <= 64 else 128, 64 if columns <= 64 else 128
        if tile_m == 128 and columns > 128 and self.stages(GemmConfig(128, 256)) > FEWEST:
            tile_n = 256
        return self.deepest(tile_m, tile_n)

    def gathering_reason(self, tiling: GemmConfig) -> str | None:
        """See the function."""
        return gathering_reason(tiling)

    def choose_gathering(
        self, kind: str, columns: int, depth: int, rows: int, operand: str, activated: int | None = None
    ) -> GemmConfig:
        """The usual one, or 128 x 128 where that is larger."""
        usual = self.choose(kind, max(columns, activated or 0), depth, rows)
        return usual if gathering_reason(usual) is None else self.deepest(128, 128)

    def for_gradient(self, usual: GemmConfig) -> GemmConfig:
        """The tiling of a kernel that goes back through the activation, for one that suits the problem otherwise."""
        return usual if gradient_reason(usual) is None else self.deepest(128, 128)

    def deepest(self, tile_m: int, tile_n: int) -> GemmConfig:
        """The tiling of a shape with all the stages there is room for."""
        return GemmConfig(tile_m, tile_n, stages=self.stages(GemmConfig(tile_m, tile_n)))
