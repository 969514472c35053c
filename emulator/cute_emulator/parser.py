"""PTX text to per-kernel lists of instructions and basic blocks.

The grammar accepted is what the CuTe DSL emits: one module of ``.entry`` functions, inline-assembly scopes in braces
with their own registers and labels, ``.loc`` line information. Operands become small tuples:

    ("reg", name) ("imm", int, spelling) ("special", "%tid.x") ("sym", name, offset) ("vec", [operand, ...])
    ("mem", base operand, byte offset, [further operands inside the brackets]) ("not", operand) ("pair", a, b) ("sink",)
"""

from __future__ import annotations

import bisect
import re
from typing import Any

from .errors import UnsupportedError

Operand = tuple

SIZES = {
    "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4, "s32": 4,
    "f32": 4, "f16x2": 4, "bf16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f32x2": 8, "b128": 16, "pred": 1,
}  # fmt: skip

_LABEL = re.compile(r"([A-Za-z_$][\w$]*)\s*:(?!:)")
_SCOPE_LABEL = re.compile(r"(?:^|[\n;{}])\s*([A-Za-z_$][\w$]*)\s*:(?!:)")
_SPACE = re.compile(r"\s*")
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)[^\n]*")
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')
_VARIABLE = re.compile(r"\.(b8|u8|s8|b16|u16|s16|b32|u32|s32|f32|b64|u64|s64|f64)\s+([\w$]+)\s*(\[(\d*)\])?")
_ALIGN = re.compile(r"\.align\s+(\d+)")
_ENTRY = re.compile(r"\.(entry|func)\b")
_PREDICATE = re.compile(r"@(!?)([%\w$]+)\s+(.*)$", re.S)
_INSN = re.compile(r"([\w.:]+)\s*(.*)$", re.S)
_MEMBASE = re.compile(r"^(.*?)\s*(\+-\d+|[+-]\s*\d+)?$", re.S)
_OPENERS = re.compile(r"[{}]")


class Insn:
    """An instruction: dotted opcode, its parts, guard ``(register, negated)``, operands, PTX line, source line."""

    __slots__ = ("line", "loc", "op", "ops", "parts", "pred", "text")

    def __init__(self, op: str, pred: tuple[str, bool] | None, ops: list[Operand], line: int, text: str, loc=None):
        self.op, self.pred, self.ops, self.line, self.text, self.loc = op, pred, ops, line, text, loc
        self.parts = op.split(".")

    def __repr__(self) -> str:
        return f"<{self.line}: {self.text}>"


class Kernel:
    """A parsed ``.entry``: parameters, registers, static memory and code (``Insn`` or ``("label", name)``)."""

    def __init__(self, name: str):
        self.name = name
        self.params: list[tuple[int, int]] = []  # (offset, size) in order
        self.param_offset: dict[str, int] = {}
        self.param_size = 0
        self.reqntid: tuple[int, int, int] | None = None
        self.regs: dict[str, str] = {}
        self.shared: dict[str, int] = {}
        self.shared_size = 0
        self.local: dict[str, int] = {}
        self.local_size = 0
        self.code: list[Any] = []
        self.module_shared: dict[str, tuple[int, int, bool]] = {}  # name -> (size, align, extern)


class Module:
    """A parsed PTX module: its target (``sm_100a``), kernels by name and the files that ``.loc`` numbers refer to."""

    def __init__(self) -> None:
        self.target = ""
        self.kernels: dict[str, Kernel] = {}
        self.files: dict[int, str] = {}


def split_operands(text: str) -> list[str]:
    """Split at the commas that are outside every bracket."""
    if not any(c in text for c in "[{("):
        return [t.strip() for t in text.split(",")] if text.strip() else []
    out, depth, start = [], 0, 0
    for i, ch in enumerate(text):
        if ch in "[{(":
            depth += 1
        elif ch in "]})":
            depth -= 1
        elif ch == "," and depth == 0:
            out.append(text[start:i].strip())
            start = i + 1
    tail = text[start:].strip()
    return [*out, tail] if tail else out


def parse_int(t: str) -> int:
    """Return an integer literal, or the bit pattern of an ``0f``/``0d`` floating-point literal."""
    if t[:2] in ("0f", "0F", "0d", "0D"):
        return int(t[2:], 16)
    t = t.rstrip("U")
    negative = t.startswith("-")
    digits = t[1:] if negative else t
    if digits[:2] in ("0x", "0X"):
        v = int(digits, 16)
    elif digits[:2] in ("0b", "0B"):
        v = int(digits, 2)
    elif len(digits) > 1 and digits[0] == "0":
        v = int(digits, 8)
    else:
        v = int(digits)
    return -v if negative else v


class _Parser:
    def __init__(self, text: str):
        # comments keep their newlines, so that line numbers stay those of the file
        text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)
        self.text = re.sub(r"//[^\n]*", "", text)
        self.newlines = [m.start() for m in re.finditer("\n", self.text)]
        self.module = Module()
        self.module_shared: dict[str, tuple[int, int, bool]] = {}
        self.kernel: Kernel | None = None
        self.scopes: list[dict[str, str]] = []
        self.scope_count = 0
        self.loc: tuple[int, int] | None = None
        self.cache: dict[str, Operand] = {}
        self.vectors: dict[str, list[str]] = {}

    def line_of(self, pos: int) -> int:
        return bisect.bisect_left(self.newlines, pos) + 1

    def resolve(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    # ---- operands ----
    def operand(self, t: str) -> Operand:
        t = t.strip()
        if self.scopes:
            return self.build(t)
        o = self.cache.get(t)
        if o is None:
            o = self.cache[t] = self.build(t)
        return o

    def build(self, t: str) -> Operand:
        assert self.kernel is not None
        if t == "_":
            return ("sink",)
        first = t[0]
        if first == "{":
            return ("vec", [self.operand(x) for x in split_operands(t[1:-1])])
        if first == "[":
            parts = split_operands(t[1:-1])
            m = _MEMBASE.match(parts[0])
            assert m is not None
            offset = int(m.group(2).replace("+-", "-").replace(" ", "")) if m.group(2) else 0
            return ("mem", self.operand(m.group(1)), offset, [self.operand(x) for x in parts[1:]])
        if first == "!":
            return ("not", self.operand(t[1:]))
        if "|" in t:
            a, b = t.split("|")
            return ("pair", self.operand(a), self.operand(b))
        if first.isdigit() or (first == "-" and t[1:2].isdigit()):
            return ("imm", parse_int(t), t)
        if t in self.vectors:
            return ("vec", [self.operand(x) for x in self.vectors[t]])
        name = self.resolve(t)
        if name in self.kernel.regs:
            return ("reg", name)
        if first == "%":
            return ("special", t)
        m = re.match(r"^([\w$]+)\s*\+\s*(\d+)$", t)
        if m:
            return ("sym", self.resolve(m.group(1)), int(m.group(2)))
        return ("sym", name, 0)

    # ---- statements ----
    def declare_registers(self, s: str) -> None:
        assert self.kernel is not None
        m = re.match(r"\.reg\s+(?:\.v([24])\s+)?\.(\w+)\s+(.*)$", s, re.S)
        assert m is not None, s
        ty = m.group(2)
        names = [name.strip() for name in m.group(3).split(",")]
        if m.group(1):  # a vector register is its elements
            for name in names:
                self.vectors[name] = [f"{name}.{c}" for c in "xyzw"[: int(m.group(1))]]
            names = [x for name in names for x in self.vectors[name]]
        for name in names:
            many = re.match(r"^(\S+?)<(\d+)>$", name)
            if many:
                for j in range(int(many.group(2))):
                    self.kernel.regs[f"{many.group(1)}{j}"] = ty
            elif self.scopes and not name.startswith("%"):
                unique = f"{name}__s{self.scopes[-1]['']}"
                self.scopes[-1][name] = unique
                self.kernel.regs[unique] = ty
            else:
                self.kernel.regs[name] = ty
        self.cache.clear()

    def declare_variable(self, s: str) -> None:
        """Module-level ``.shared`` arrays, or ``.shared``/``.local`` arrays of the kernel being parsed."""
        space = re.search(r"\.(shared|global|const|local)\b", s)
        var = _VARIABLE.search(s)
        if not (space and var):
            return
        size = SIZES[var.group(1)] * (int(var.group(4)) if var.group(4) else 1 if not var.group(3) else 0)
        al = _ALIGN.search(s)
        align = int(al.group(1)) if al else SIZES[var.group(1)]
        name = var.group(2)
        k = self.kernel
        if k is None:
            if space.group(1) == "shared":
                self.module_shared[name] = (size, max(align, 16), "extern" in s)
            return
        if space.group(1) == "shared":
            k.shared[name] = -(-k.shared_size // align) * align
            k.shared_size = k.shared[name] + size
        else:
            k.local[name] = -(-k.local_size // align) * align
            k.local_size = k.local[name] + size

    def statement(self, s: str, pos: int) -> None:
        s = " ".join(s.split())
        if not s:
            return
        k = self.kernel
        assert k is not None
        if s[0] == ".":
            if s.startswith(".reg"):
                self.declare_registers(s)
            elif s.startswith((".shared", ".local")):
                self.declare_variable(s)
            elif not s.startswith(".pragma"):
                raise UnsupportedError(f"PTX line {self.line_of(pos)}: directive {s[:80]}")
            return
        pred = None
        body = s
        m = _PREDICATE.match(s)
        if m:
            pred = (self.resolve(m.group(2)), m.group(1) == "!")
            body = m.group(3)
        m = _INSN.match(body)
        if m is None:
            raise UnsupportedError(f"PTX line {self.line_of(pos)}: cannot parse {s[:120]}")
        ops = [self.operand(x) for x in split_operands(m.group(2))]
        k.code.append(Insn(m.group(1).rstrip("."), pred, ops, self.line_of(pos), s, self.loc))

    def header(self, pos: int) -> int:
        """Parse ``.entry name(params) directives {`` and return the position after the brace."""
        text = self.text
        open_ = text.index("(", pos)
        close = text.index(")", open_)
        body = text.index("{", close)
        k = self.kernel = Kernel(text[pos:open_].split()[-1])
        offset = 0
        for p in text[open_ + 1 : close].split(","):
            if not p.strip():
                continue
            al = re.search(r"\.align\s+(\d+)\s+\.b8", p)
            m = re.search(r"([\w$]+)(\[(\d+)\])?\s*$", p.strip())
            ty = re.findall(r"\.(b8|u8|s8|b16|u16|s16|b32|u32|s32|f32|b64|u64|s64|f64)\b", p)
            assert m is not None
            size = int(m.group(3)) if m.group(3) else SIZES[ty[0]]
            align = int(al.group(1)) if al else size
            offset = -(-offset // align) * align
            k.params.append((offset, size))
            k.param_offset[m.group(1)] = offset
            offset += size
        k.param_size = offset
        m = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", text[close:body])
        if m:
            x, y, z = (int(v) if v else 1 for v in m.groups())
            k.reqntid = (x, y, z)
        self.scopes, self.loc = [], None
        self.cache.clear()
        return body + 1

    def open_scope(self, pos: int) -> None:
        """Enter an inline-assembly scope; its labels are collected first so that forward branches resolve."""
        self.scope_count += 1
        depth, end = 0, pos
        for m in _OPENERS.finditer(self.text, pos):
            depth += 1 if m.group() == "{" else -1
            if depth == 0:
                end = m.start()
                break
        scope = {"": str(self.scope_count)}
        for label in _SCOPE_LABEL.findall(self.text, pos + 1, end):
            scope[label] = f"{label}__s{self.scope_count}"
        self.scopes.append(scope)

    def run(self) -> Module:
        text, pos, n = self.text, 0, len(self.text)
        m = re.search(r"\.target\s+(\w+)", text)
        self.module.target = m.group(1) if m else ""
        self.module.files = {int(a): b for a, b in _FILE.findall(text)}
        while True:
            if self.kernel is None:
                nxt = _ENTRY.search(text, pos)
                stop = nxt.start() if nxt else n
                for decl in re.findall(
                    r"^[ \t]*\.(?:visible|extern|weak|shared|global|const)[^;{}]*;", text[pos:stop], re.M
                ):
                    self.declare_variable(decl)
                if nxt is None:
                    return self.module
                if nxt.group(1) == "func":
                    raise UnsupportedError(f"PTX line {self.line_of(stop)}: device functions (.func) are not supported")
                pos = self.header(nxt.start())
                continue
            pos = _SPACE.match(text, pos).end()  # type: ignore[union-attr]
            ch = text[pos]
            if ch == "{":
                self.open_scope(pos)
                pos += 1
            elif ch == "}":
                pos += 1
                if self.scopes:
                    self.scopes.pop()
                else:
                    self.kernel.module_shared = self.module_shared
                    self.module.kernels[self.kernel.name] = self.kernel
                    self.kernel = None
            elif ch == ".":
                m = _LOC.match(text, pos)
                if m:
                    self.loc = (int(m.group(1)), int(m.group(2)))
                    pos = m.end()
                    continue
                end = text.index(";", pos)
                self.statement(text[pos:end], pos)
                pos = end + 1
            else:
                m = _LABEL.match(text, pos)
                if m:
                    self.kernel.code.append(("label", self.resolve(m.group(1))))
                    pos = m.end()
                    continue
                end = text.index(";", pos)
                self.statement(text[pos:end], pos)
                pos = end + 1


def parse_module(text: str) -> Module:
    """Parse a PTX module.

    Raises:
        UnsupportedError: a directive or statement outside the accepted grammar, named with its PTX line.
    """
    return _Parser(text).run()


class Block:
    """A basic block: instructions, the branch target, the next block in the text, and all blocks that may follow."""

    __slots__ = ("following", "idx", "insns", "succ", "target")

    def __init__(self, idx: int):
        self.idx = idx
        self.insns: list[Insn] = []
        self.succ: list[int] = []
        self.target: int | None = None
        self.following: int | None = None


def build_blocks(k: Kernel) -> list[Block]:
    """Basic blocks of a kernel, in the order of ``_reconvergence_order`` and numbered by it."""
    blocks, labels = [Block(0)], {}
    for c in k.code:
        if isinstance(c, tuple):
            if blocks[-1].insns:
                blocks.append(Block(len(blocks)))
            labels[c[1]] = blocks[-1].idx
            continue
        blocks[-1].insns.append(c)
        if c.parts[0] in ("bra", "ret", "exit", "brx", "trap"):
            blocks.append(Block(len(blocks)))
    if not blocks[-1].insns:
        if blocks[-1].idx in labels.values():
            blocks[-1].insns.append(Insn("ret", None, [], 0, "ret (implicit)"))
        else:
            blocks.pop()
    for b in blocks:
        last, following = b.insns[-1], b.idx + 1
        if last.parts[0] == "bra":
            b.target = labels[last.ops[0][1]]
            b.succ = [b.target] + ([following] if last.pred else [])
        elif last.parts[0] in ("ret", "exit"):
            b.succ = [following] if last.pred else []
        else:
            b.succ = [following] if following < len(blocks) else []
        b.following = following if following in b.succ else None
    order = _reconvergence_order([b.succ for b in blocks])
    number = {old: new for new, old in enumerate(order)}
    out = [blocks[old] for old in order]
    for b in out:
        b.idx = number[b.idx]
        b.succ = [number[x] for x in b.succ]
        b.target = None if b.target is None else number[b.target]
        b.following = None if b.following is None else number[b.following]
    return out


def _post_order(succ: list[list[int]]) -> list[int]:
    """Depth-first post-order from block 0; successors are visited in the order given."""
    seen, out = {0}, []
    stack = [(0, iter(succ[0]))]
    while stack:
        node, rest = stack[-1]
        for s in rest:
            if s not in seen:
                seen.add(s)
                stack.append((s, iter(succ[s])))
                break
        else:
            stack.pop()
            out.append(node)
    return out


def _natural_loops(succ: list[list[int]]) -> list[set[int]]:
    """Bodies of the natural loops, by dominators (Cooper, Harvey and Kennedy's iteration over reverse post-order)."""
    rpo = _post_order(succ)[::-1]
    place = {b: i for i, b in enumerate(rpo)}
    preds: dict[int, list[int]] = {b: [] for b in rpo}
    for b in rpo:
        for s in succ[b]:
            preds[s].append(b)
    idom = {0: 0}
    changed = True
    while changed:
        changed = False
        for b in rpo[1:]:
            new = None
            for p in preds[b]:
                if p not in idom:
                    continue
                if new is None:
                    new = p
                    continue
                x, y = p, new
                while x != y:
                    while place[x] > place[y]:
                        x = idom[x]
                    while place[y] > place[x]:
                        y = idom[y]
                new = x
            if new is not None and idom.get(b) != new:
                idom[b] = new
                changed = True
    loops: dict[int, set[int]] = {}
    for b in rpo:
        for head in succ[b]:
            x = b
            while place[x] > place[head]:
                x = idom[x]
            if x != head:
                continue  # not a back edge
            body = loops.setdefault(head, {head})
            work = [b]
            while work:
                n = work.pop()
                if n not in body:
                    body.add(n)
                    work += preds[n]
    return list(loops.values())


def _reconvergence_order(succ: list[list[int]]) -> list[int]:
    """Order of blocks in which a diverged warp meets again where it can first.

    The fragment with the lowest number runs, so every forward edge must lead to a higher number and the exits of a loop
    must come after all of its blocks: a reverse post-order that visits the edges leaving most loops first.
    """
    loops: list[list[int]] = [[] for _ in succ]
    for i, body in enumerate(_natural_loops(succ)):
        for b in body:
            loops[b].append(i)
    sets = [frozenset(x) for x in loops]
    ordered = []
    for b, following in enumerate(succ):
        common = {t: len(sets[b] & sets[t]) for t in following}
        ordered.append(sorted(following, key=common.__getitem__))
    return _post_order(ordered)[::-1]
