"""Translate one PTX kernel to a Python generator function that executes one warp.

Registers are local variables. Blocks are numbered in text order; a warp runs the fragment with the lowest block number,
so fragments meet again at the earliest block they share. While all live lanes are together the plain variant of a block
runs (plain assignments); while they are apart the partial variant runs, where every write of a register that is live
into some block is merged under the mask. The function yields what the warp waits for.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from .clocked.schedule import refuse, schedule
from .errors import UnsupportedError
from .isa import WIDTH, destinations, lookup
from .memory import SHARED_START
from .parser import Insn, Kernel, Operand, build_blocks
from .support import NAMESPACE

SPECIAL = {
    "%tid.x": "w.tidx", "%tid.y": "w.tidy", "%tid.z": "w.tidz", "%laneid": "w.laneid", "%warpid": "w.wid",
    "%ctaid.x": "w.cta.id[0]", "%ctaid.y": "w.cta.id[1]", "%ctaid.z": "w.cta.id[2]",
    "%ntid.x": "w.launch.block[0]", "%ntid.y": "w.launch.block[1]", "%ntid.z": "w.launch.block[2]",
    "%nctaid.x": "w.launch.grid[0]", "%nctaid.y": "w.launch.grid[1]", "%nctaid.z": "w.launch.grid[2]",
    "%cluster_ctarank": "w.cta.rank", "%cluster_nctarank": "w.cta.cluster.size",
    "%cluster_ctaid.x": "w.cta.cluster_ctaid[0]", "%cluster_ctaid.y": "w.cta.cluster_ctaid[1]",
    "%cluster_ctaid.z": "w.cta.cluster_ctaid[2]", "%cluster_nctaid.x": "w.launch.cluster[0]",
    "%cluster_nctaid.y": "w.launch.cluster[1]", "%cluster_nctaid.z": "w.launch.cluster[2]",
    "%clusterid.x": "w.cta.cluster_id[0]", "%clusterid.y": "w.cta.cluster_id[1]", "%clusterid.z": "w.cta.cluster_id[2]",
    "%nclusterid.x": "w.launch.nclusters[0]", "%nclusterid.y": "w.launch.nclusters[1]",
    "%nclusterid.z": "w.launch.nclusters[2]", "%smid": "w.cta.smid", "%nsmid": "w.launch.num_sms",
    "%clock64": "w.launch.clock()",
    "%clock": "w.launch.clock()", "%globaltimer": "w.launch.global_timer()", "%lanemask_lt": "w.lanemask_lt",
    "%lanemask_le": "w.lanemask_le", "%lanemask_eq": "w.lanemask_eq", "%lanemask_gt": "w.lanemask_gt",
    "%lanemask_ge": "w.lanemask_ge", "%dynamic_smem_size": "w.launch.smem", "%is_explicit_cluster": "True",
    "%nwarpid": "w.cta.nwarps",
}  # fmt: skip
_ENDS = ("bra", "ret", "exit")
_PENDING_SOURCES = ("wgmma.mma_async", "tcgen05.ld")


def _registers(o: Operand, out: list[str]) -> list[str]:
    kind = o[0]
    if kind == "reg":
        out.append(o[1])
    elif kind == "vec":
        for x in o[1]:
            _registers(x, out)
    elif kind == "mem":
        _registers(o[1], out)
        for x in o[3]:
            _registers(x, out)
    elif kind == "not":
        _registers(o[1], out)
    elif kind == "pair":
        _registers(o[1], out)
        _registers(o[2], out)
    return out


def definitions_and_uses(ins: Insn) -> tuple[list[str], list[str]]:
    """Return the registers that an instruction writes and reads; a guarded write also reads what it writes."""
    n, accumulates = destinations(ins)
    defs: list[str] = []
    uses: list[str] = []
    for o in ins.ops[:n]:
        _registers(o, defs)
    for o in ins.ops[n:]:
        _registers(o, uses)
    if accumulates:
        uses += defs
    if ins.pred:
        uses = [*uses, ins.pred[0], *defs]
    return defs, uses


class Generator:
    """Translates one kernel; ``source()`` returns the text of ``def warp(w, m, cnt, frags)``.

    With ``clocked`` its warps note what their instructions take, and give way before each event.
    """

    def __init__(self, k: Kernel, clocked: bool = False):
        self.k, self.clocked = k, clocked
        self.blocks = build_blocks(k)
        self.names = {r: "v_" + re.sub(r"\W", "_", r) for r in k.regs}
        self.constants: dict[str, str] = {}
        self.unsupported: dict[str, int] = {}  # refusal -> first PTX line
        self.guarded = False  # emitting for a subset of the active lanes: every write must keep the others' values
        self._layout_shared()
        self._liveness()
        self._find_pending()

    def _layout_shared(self) -> None:
        """Place static shared memory after the system's KiB, and dynamic shared memory after that."""
        k = self.k
        self.static: dict[str, int] = {}
        offset = 0
        for name, (size, align, extern) in k.module_shared.items():
            if not extern:
                offset = -(-offset // align) * align
                self.static[name] = offset
                offset += size
        offset = -(-offset // 16) * 16
        for name, o in k.shared.items():
            self.static[name] = offset + o
        offset += k.shared_size
        align = max([a for _, a, extern in k.module_shared.values() if extern] + [16])
        self.dynamic_shared = -(-(SHARED_START + offset) // align) * align
        self.extern = {name for name, (_, _, extern) in k.module_shared.items() if extern}

    def _liveness(self) -> None:
        """Registers that are live into some block must be merged when a diverged warp writes them."""
        ids = {r: i for i, r in enumerate(self.k.regs)}
        gen, kill = [], []
        for b in self.blocks:
            g = kl = 0
            for ins in b.insns:
                defs, uses = definitions_and_uses(ins)
                for r in uses:
                    bit = 1 << ids[r]
                    if not kl & bit:
                        g |= bit
                for r in defs:
                    kl |= 1 << ids[r]
            gen.append(g)
            kill.append(kl)
        live = list(gen)
        changed = True
        while changed:
            changed = False
            for b in reversed(self.blocks):
                after = 0
                for s in b.succ:
                    if s < len(live):
                        after |= live[s]
                n = gen[b.idx] | (after & ~kill[b.idx])
                if n != live[b.idx]:
                    live[b.idx] = n
                    changed = True
        anywhere = 0
        for x in live:
            anywhere |= x
        self.global_regs = [r for r, i in ids.items() if anywhere >> i & 1]
        self.global_set = set(self.global_regs)

    def _find_pending(self) -> None:
        """Registers that may hold an undelivered result: the targets of asynchronous instructions, and their copies."""
        pending: set[str] = set()
        moves: dict[str, list[str]] = {}
        for b in self.blocks:
            for ins in b.insns:
                if ins.op.startswith(_PENDING_SOURCES):
                    pending.update(_registers(ins.ops[0], []))
                elif ins.parts[0] == "mov" and ins.ops[0][0] == "reg" and ins.ops[1][0] == "reg":
                    moves.setdefault(ins.ops[1][1], []).append(ins.ops[0][1])
        work = list(pending)
        while work:
            for d in moves.get(work.pop(), ()):
                if d not in pending:
                    pending.add(d)
                    work.append(d)
        self.pending = pending

    def maps_in_memory(self) -> bool:
        """Return whether a copy may use a tensor map that is no parameter: its address is not derived from one."""
        insns = [ins for b in self.blocks for ins in b.insns]
        made: dict[str, list[Insn]] = {}
        for ins in insns:
            for r in definitions_and_uses(ins)[0]:
                made.setdefault(r, []).append(ins)
        of_parameter = set(made)

        def is_parameter(o: Operand) -> bool:
            return o[1] in (of_parameter if o[0] == "reg" else self.k.param_offset if o[0] == "sym" else ())

        def keeps(ins: Insn) -> bool:
            combine = {"mov": any, "cvta": any, "add": any, "sub": any, "selp": all}.get(ins.parts[0])
            return combine is not None and combine(is_parameter(o) for o in ins.ops[1:3])

        before = -1
        while before != len(of_parameter):
            before = len(of_parameter)
            of_parameter = {r for r in of_parameter if all(map(keeps, made[r]))}
        tensor = ("cp.async.bulk.tensor.", "cp.reduce.async.bulk.tensor.")
        copies = [ins for ins in insns if ins.op.startswith(tensor)]
        maps = [o[1] for ins in copies for o in ins.ops if o[0] == "mem" and o[3]]  # the operands with coordinates
        return not all(map(is_parameter, maps))

    # ---- operands, for emitters ----
    def width(self, o: Operand) -> int | None:
        """Return the bits of a register operand, None for others."""
        return WIDTH[self.k.regs[o[1]]] if o[0] == "reg" else None

    def val(self, o: Operand, bits: int = 32, raw: bool = False) -> str:
        """Return the expression of a source operand; ``raw`` lets a register through that has not been delivered."""
        kind = o[0]
        if kind == "reg":
            name = self.names[o[1]]
            return f"ready({name}, w)" if o[1] in self.pending and not raw else name
        if kind == "imm":
            return ("True" if o[1] else "False") if bits == 1 else str(o[1] & ((1 << bits) - 1))
        if kind == "special":
            if o[1] not in SPECIAL:
                raise UnsupportedError("special register " + o[1])
            return SPECIAL[o[1]]
        if kind == "sym":
            name, offset = o[1], o[2]
            if name in self.extern:
                return f"(w.cta.shared_base + {self.dynamic_shared + offset})"
            if name in self.static:
                return f"(w.cta.shared_base + {SHARED_START + self.static[name] + offset})"
            if name in self.k.param_offset:
                return f"(w.launch.param_addr + {self.k.param_offset[name] + offset})"
            if name in self.k.local:
                return f"(LOCAL_BASE + {self.k.local[name] + offset})"
            raise UnsupportedError("symbol " + name)
        if kind == "not":
            return f"({self.val(o[1], 1)} ^ True)"
        if kind == "sink":
            return "None"
        raise UnsupportedError(f"operand {o}")

    def addr(self, o: Operand) -> str:
        """Return the expression of the address of a memory operand."""
        base = self.val(o[1], 64)
        return base if o[2] == 0 else f"({base} {'+' if o[2] > 0 else '-'} {abs(o[2])})"

    def assign(self, o: Operand, expr: str, part: bool) -> str:
        """Statement that gives a destination operand its value, merged under the mask where lanes may be apart."""
        if o[0] == "sink":
            return expr
        if o[0] != "reg":
            raise UnsupportedError(f"destination {o}")
        name = self.names[o[1]]
        if part and (self.guarded or o[1] in self.global_set):
            bits = WIDTH[self.k.regs[o[1]]]
            if o[1] in self.pending:
                return f"{name} = merge(m, peek({expr}), peek({name}), {bits})"
            if bits == 1:
                return f"{name} = mergep(m, {expr}, {name})"
            if bits == 128:
                return f"{name} = merge_pair(m, {expr}, {name})"
            return f"{name} = merge(m, {expr}, {name}, {bits})"
        return f"{name} = {expr}"

    def constant(self, expr: str) -> str:
        """Name of a module-level constant of the generated code; refuses at translation what ``expr`` refuses."""
        name = self.constants.get(expr)
        if name is None:
            eval(expr, dict(NAMESPACE))
            name = self.constants[expr] = f"F{len(self.constants)}"
        return name

    # ---- code ----
    def _body(self, ins: Insn, part: bool) -> list[str]:
        entry = lookup(ins)
        if self.clocked:
            refuse(ins)
        lines = entry.emit(self, ins, part)
        if entry.line or any("ready(" in x for x in lines):
            return [f"w.line = {ins.line}", *lines]
        return lines

    def _guarded_body(self, ins: Insn) -> list[str]:
        """The body for those lanes whose guard holds; a register of this block alone has values in the others too."""
        self.guarded = True
        try:
            return self._body(ins, True)
        finally:
            self.guarded = False

    def _instruction(self, ins: Insn, part: bool, pad: str) -> list[str]:
        try:
            lines = self._body(ins, part)
            guarded = self._guarded_body(ins) if ins.pred else []
        except UnsupportedError as e:
            self.unsupported.setdefault(str(e), ins.line)
            lines = guarded = [f"w.line = {ins.line}", f"unsupported(w, {f'{e}: {ins.text}'[:400]!r})"]
        except Exception as e:
            raise RuntimeError(f"PTX line {ins.line}: {ins.text}: {e!r}") from e
        if not ins.pred:
            return [pad + x for x in lines]
        c = self.names[ins.pred[0]]
        return [
            f"{pad}q_ = {f'({c} ^ True)' if ins.pred[1] else c}",
            f"{pad}if q_ is True:",
            *[f"{pad}  {x}" for x in lines],
            f"{pad}elif q_ is not False:",
            f"{pad}  q_ = m & q_",
            f"{pad}  if q_.any():",
            f"{pad}    sv_ = m; m = q_",
            *[f"{pad}    {x}" for x in guarded],
            f"{pad}    m = sv_",
        ]

    def _block(self, b: Any, part: bool, ind: int) -> list[str]:
        pad = " " * ind
        out = [f"{pad}cnt[{b.idx}] += 1"]
        last = b.insns[-1]
        end = last if last.parts[0] in _ENDS else None
        spent = schedule(b.insns, definitions_and_uses) if self.clocked else {}
        for i, ins in enumerate(b.insns[:-1] if end else b.insns):
            if i in spent:
                out.append(f"{pad}w.spend{spent[i]}; yield None")
            out += self._instruction(ins, part, pad)
        if spent:
            out.append(f"{pad}w.spend{spent[len(b.insns)]}")
        following = b.following
        if end is None:
            return [
                *out,
                f"{pad}pc = {following}" if following is not None else f"{pad}w.fail('the kernel runs off its end')",
            ]
        lookup(end)
        cond = None
        if end.pred:
            c = self.names[end.pred[0]]
            cond = f"({c} ^ True)" if end.pred[1] else c
        if end.parts[0] == "bra":
            if b.target <= b.idx:  # a backward branch: give the others a turn now and then
                out += [
                    f"{pad}w.spin += 1",
                    f"{pad}if w.spin > w.spin_limit:",
                    f"{pad}  w.spin = 0; yield None",
                ]
            if cond is None:
                return [*out, f"{pad}pc = {b.target}"]
            return [
                *out,
                f"{pad}t_ = {cond}",
                f"{pad}if t_ is True: pc = {b.target}",
                f"{pad}elif t_ is False: pc = {following}",
                f"{pad}else: pc, m = w.split(frags, m, t_, {b.target}, {following})",
            ]
        leave = "w.ret(frags, m)" if cond is None else f"w.ret_if(frags, m, {cond}, {following})"
        return [*out, f"{pad}pc, m = {leave}", f"{pad}if m is None: return"]

    def _tree(self, lo: int, hi: int, part: bool, ind: int) -> list[str]:
        """Return a binary search for the block number, because Python has no computed goto."""
        if hi - lo == 1:
            return self._block(self.blocks[lo], part, ind)
        mid, pad = (lo + hi) // 2, " " * ind
        return [
            f"{pad}if pc < {mid}:",
            *self._tree(lo, mid, part, ind + 1),
            f"{pad}else:",
            *self._tree(mid, hi, part, ind + 1),
        ]

    def source(self) -> str:
        """Return the kernel as Python source."""
        n = len(self.blocks)
        body = self._tree(0, n, False, 5)
        partial = self._tree(0, n, True, 5)
        out = [f"{name} = {expr}" for expr, name in self.constants.items()]
        out.append("def warp(w, m, cnt, frags):")
        for is_pred, zero in ((False, "0"), (True, "False")):
            names = [self.names[r] for r in self.global_regs if (self.k.regs[r] == "pred") == is_pred]
            for i in range(0, len(names), 50):
                out.append("  " + " = ".join(names[i : i + 50]) + f" = {zero}")
        out += [
            "  pc = 0",
            "  while True:",
            "    if frags: pc, m = w.resched(frags, pc, m)",
            "    w.pc = pc",
            "    if not frags:",
            *body,
            "    else:",
            *partial,
            "  yield None",
        ]
        return "\n".join(out) + "\n"

    def histogram(self) -> list[dict[str, int]]:
        """Return how many instructions of each opcode a block has."""
        return [dict(Counter(i.op for i in b.insns)) for b in self.blocks]
