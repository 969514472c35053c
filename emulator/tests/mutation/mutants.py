"""Mutants of a PTX text: every synchronising instruction deleted, and kinds of semantic bug at chosen places.

A mutant has an id, ``kind@opcode#occurrence``, that stays the same as long as the compiler's output does.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_INSTRUCTION = re.compile(
    r"^(?P<indent>\s*)(?P<guard>@!?[%\w]+\s+)?(?P<op>[a-z][\w.:]*)(?P<rest>(\s[^;]*)?);\s*(//.*)?$"
)
_SYNCHRONISING = re.compile(
    r"^(mbarrier\.|bar\.|barrier\.|fence\.|membar|cp\.async\.(bulk\.)?(commit_group|wait_group|wait_all|mbarrier)"
    r"|tcgen05\.(alloc|dealloc|relinquish|commit|wait|fence)|wgmma\.(fence|commit_group|wait_group)|griddepcontrol)"
)
_STRONG = ("ld.", "st.", "atom.", "red.", "multimem.")
_RELEASE_OR_ACQUIRE = r"\.(release|acquire)\.(gpu|sys)"
_OPERAND = r"(?:%?[\w$]+|-?\d+)"


@dataclass(frozen=True)
class Mutant:
    """``line``: index of the mutated line; ``text``: the whole mutated PTX."""

    id: str
    kind: str
    line: int
    original: str
    text: str


@dataclass(frozen=True)
class Instruction:
    line: int
    op: str
    guard: str
    operands: list[str]
    source: str


def split_operands(text):
    """Top-level comma-separated operands."""
    out, depth, cur = [], 0, ""
    for ch in text:
        depth += int(ch in "{[(")
        depth -= int(ch in "}])")
        if ch == "," and depth == 0:
            out.append(cur.strip())
            cur = ""
        else:
            cur += ch
    return [*out, cur.strip()] if cur.strip() else out


def instructions(text):
    """Every instruction of the text that stands on a line of its own."""
    for i, line in enumerate(text.splitlines()):
        m = _INSTRUCTION.match(line)
        if m and not m["op"].startswith("."):
            yield Instruction(i, m["op"], m["guard"] or "", split_operands(m["rest"] or ""), line.strip())


def _with_register(ins, index, bits, change, part=None):
    """The instruction with operand ``index`` (or ``part`` of it) replaced by a changed copy in a new register.

    ``change``: (operation, immediate), e.g. ("add", 16).
    """
    value = part or ins.operands[index]
    op, imm = change
    width = "s" if op == "add" else "b"
    operands = list(ins.operands)
    operands[index] = operands[index].replace(value, "mutant", 1)
    call = f"{ins.guard}{ins.op} {', '.join(operands)};"
    return f"{{ .reg .b{bits} mutant; {op}.{width}{bits} mutant, {value}, {imm}; {call} }}"


def _delete(ins):
    """Nothing instead of the instruction; a wait becomes one that has already succeeded."""
    if ins.op.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
        return f"setp.eq.u32 {ins.operands[0]}, 0, 0;"
    return ""


def _address(ins, index, delta):
    return _with_register(ins, index, 32, ("add", delta), re.search(rf"\[({_OPERAND})", ins.operands[index])[1])


def _coordinate(ins, index, which, delta):
    """Tensor coordinate ``which`` of the map operand changed."""
    inner = re.search(r"\{([^}]*)\}", ins.operands[index])[1]
    coords = [c.strip() for c in inner.split(",")]
    if which >= len(coords):
        return None
    changed = [*coords]
    changed[which] = "mutant"
    operands = list(ins.operands)
    operands[index] = operands[index].replace(inner, ", ".join(changed))
    call = f"{ins.guard}{ins.op} {', '.join(operands)};"
    return f"{{ .reg .b32 mutant; add.s32 mutant, {coords[which]}, {delta}; {call} }}"


def _immediate(ins, index, delta):
    operands = list(ins.operands)
    operands[index] = str(int(operands[index]) + delta)
    return f"{ins.guard}{ins.op} {', '.join(operands)};"


def _swap(ins, i, j):
    operands = list(ins.operands)
    operands[i], operands[j] = operands[j], operands[i]
    return f"{ins.guard}{ins.op} {', '.join(operands)};"


def _predicate(ins, index, value):
    operands = list(ins.operands)
    operands[index] = "mutant"
    return (
        f"{{ .reg .pred mutant; setp.{'eq' if value else 'ne'}.u32 mutant, 0, 0; "
        f"{ins.guard}{ins.op} {', '.join(operands)}; }}"
    )


def _operation(ins, old, new):
    return f"{ins.guard}{ins.op.replace(old, new, 1)} {', '.join(ins.operands)};"


def _is_load(ins):
    return ins.op.startswith("cp.async.bulk.tensor") and ".shared::c" in ins.op.split(".global")[0]


def _is_store(ins):
    return ins.op.startswith("cp.async.bulk.tensor") and ".global.shared::cta" in ins.op


def _is_mma(ins):
    return ins.op.startswith("tcgen05.mma.")


def _is_wgmma(ins):
    return ins.op.startswith("wgmma.mma_async")


def _last_predicate(ins):
    """Index of the enable-input-d predicate of a tensor-core MMA: the last operand."""
    return len(ins.operands) - 1


# kind -> (which instructions, the replacement; None if it does not apply)
KINDS: dict[str, tuple[Callable, Callable]] = {
    # barriers and phases
    "wrong parity": (
        lambda i: i.op.startswith("mbarrier.try_wait.parity"),
        lambda i: _with_register(i, 2, 32, ("xor", 1)),
    ),
    "phase bit never flips": (lambda i: i.op == "xor.b32" and i.operands[2:] == ["1"], lambda i: _immediate(i, 2, -1)),
    "one arrival too many": (
        lambda i: i.op.startswith("mbarrier.arrive.shared"),
        lambda i: f"{i.source} {i.source}",
    ),
    "barrier expects one more": (
        lambda i: i.op.startswith("mbarrier.init"),
        lambda i: _with_register(i, 1, 32, ("add", 1)),
    ),
    "barrier expects half": (
        lambda i: i.op.startswith("mbarrier.init"),
        lambda i: _with_register(i, 1, 32, ("shr", 1)),
    ),
    "expects more bytes": (
        lambda i: ".expect_tx" in i.op,
        lambda i: _with_register(i, len(i.operands) - 1, 32, ("add", 16)),
    ),
    "expects fewer bytes": (
        lambda i: ".expect_tx" in i.op,
        lambda i: _with_register(i, len(i.operands) - 1, 32, ("add", -16)),
    ),
    "waits on the next barrier": (
        lambda i: i.op.startswith("mbarrier.try_wait"),
        lambda i: _address(i, 1, 8),
    ),
    "releases the next barrier": (
        lambda i: i.op.startswith("mbarrier.arrive.shared"),
        lambda i: _address(i, 1, 8),
    ),
    "named barrier with fewer threads": (
        lambda i: i.op == "bar.sync" and len(i.operands) == 2 and i.operands[1].isdigit(),
        lambda i: _immediate(i, 1, -32),
    ),
    "other named barrier": (
        lambda i: i.op == "bar.sync" and len(i.operands) == 2 and i.operands[0].isdigit(),
        lambda i: _immediate(i, 0, 5),
    ),
    "wait_group too lenient": (
        lambda i: "wait_group" in i.op and i.operands[:1] and i.operands[0].isdigit(),
        lambda i: _immediate(i, 0, 1),
    ),
    # words of global memory
    "not released": (
        lambda i: i.op.startswith(_STRONG) and ".release" in i.op,
        lambda i: _operation(i, ".release", ".relaxed"),
    ),
    "not acquired": (
        lambda i: i.op.startswith(_STRONG) and ".acquire" in i.op,
        lambda i: _operation(i, ".acquire", ".relaxed"),
    ),
    "weak flag": (
        lambda i: i.op.startswith(("ld.", "st.")) and re.search(_RELEASE_OR_ACQUIRE, i.op) is not None,
        lambda i: _operation(i, re.search(_RELEASE_OR_ACQUIRE, i.op)[0], ""),
    ),
    "flag not raised": (lambda i: i.op.startswith(_STRONG) and ".release" in i.op, _delete),
    "another flag": (
        lambda i: i.op.startswith(_STRONG) and ".release" in i.op,
        lambda i: _with_register(i, 0, 64, ("add", 4), re.search(rf"\[({_OPERAND})", i.operands[0])[1]),
    ),
    "scope of the GPU": (
        lambda i: i.op.startswith(_STRONG) and ".sys" in i.op,
        lambda i: _operation(i, ".sys", ".gpu"),
    ),
    "scope of the CTA": (
        lambda i: i.op.startswith(_STRONG) and ".gpu" in i.op,
        lambda i: _operation(i, ".gpu", ".cta"),
    ),
    "published after its read": (
        lambda i: i.op == "cp.async.bulk.wait_group",
        lambda i: _operation(i, "wait_group", "wait_group.read"),
    ),
    # clusters
    "wrong CTA of the pair": (lambda i: i.op.startswith("mapa."), lambda i: _with_register(i, 2, 32, ("xor", 1))),
    "wrong multicast mask": (
        lambda i: _is_load(i) and "multicast" in i.op,
        lambda i: _with_register(i, 3, 16, ("xor", 1)),
    ),
    "wrong commit mask": (
        lambda i: i.op.startswith("tcgen05.commit") and "multicast" in i.op,
        lambda i: _with_register(i, 1, 16, ("xor", 1)),
    ),
    # tensor copies
    "load coordinate off by one": (_is_load, lambda i: _coordinate(i, 1, 1, 1)),
    "load coordinate off by a chunk": (_is_load, lambda i: _coordinate(i, 1, 0, 8)),
    "load into the wrong place": (_is_load, lambda i: _address(i, 0, 1024)),
    "load signals the next barrier": (_is_load, lambda i: _address(i, 2, 8)),
    "store coordinate off by one": (_is_store, lambda i: _coordinate(i, 0, 1, 1)),
    "store from the wrong place": (_is_store, lambda i: _address(i, 1, 512)),
    # descriptors
    "descriptor of A one step further": (_is_mma, lambda i: _with_register(i, 1, 64, ("add", 2))),
    "descriptor of B one step further": (
        lambda i: _is_mma(i) or _is_wgmma(i),
        lambda i: _with_register(i, 2, 64, ("add", 2)),
    ),
    "wrong swizzle of A": (
        lambda i: _is_mma(i) or (_is_wgmma(i) and not i.operands[1].startswith("{")),
        lambda i: _with_register(i, 1, 64, ("xor", 6 << 61 if _is_mma(i) else 1 << 62)),
    ),
    "wrong stride of B": (
        lambda i: _is_mma(i) or _is_wgmma(i),
        lambda i: _with_register(i, 2, 64, ("xor", 1 << 37)),
    ),
    "wrong leading offset of A": (
        lambda i: _is_mma(i) or (_is_wgmma(i) and not i.operands[1].startswith("{")),
        lambda i: _with_register(i, 1, 64, ("xor", 1 << 21)),
    ),
    "wrong element type": (_is_mma, lambda i: _with_register(i, 3, 32, ("xor", 1 << 7))),
    "wrong major of B": (_is_mma, lambda i: _with_register(i, 3, 32, ("xor", 1 << 16))),
    "negated A": (
        lambda i: _is_mma(i) or (_is_wgmma(i) and len(i.operands) > 5),
        lambda i: _with_register(i, 3, 32, ("xor", 1 << 13)) if _is_mma(i) else _immediate(i, 4, -2),
    ),
    "wrong N": (_is_mma, lambda i: _with_register(i, 3, 32, ("xor", 4 << 17))),
    # accumulation and scales
    "never accumulates": (
        lambda i: _is_mma(i) or _is_wgmma(i),
        lambda i: _predicate(i, _last_predicate(i) if _is_mma(i) else 3, False),
    ),
    "always accumulates": (
        lambda i: _is_mma(i) or _is_wgmma(i),
        lambda i: _predicate(i, _last_predicate(i) if _is_mma(i) else 3, True),
    ),
    "swapped scales": (lambda i: _is_mma(i) and "block_scale" in i.op, lambda i: _swap(i, 4, 5)),
    "wrong scale id": (
        lambda i: _is_mma(i) and "mxf8f6f4" in i.op,
        lambda i: _with_register(i, 3, 32, ("xor", 1 << 29)),
    ),
    "wrong scale format": (
        lambda i: _is_mma(i) and "mxf4nvf4" in i.op,
        lambda i: _with_register(i, 3, 32, ("xor", 1 << 23)),
    ),
    "scales to the wrong column": (lambda i: i.op.startswith("tcgen05.cp"), lambda i: _address(i, 0, 4)),
    "accumulator of another column": (
        _is_mma,
        lambda i: _with_register(i, 0, 32, ("add", 32), re.search(rf"\[({_OPERAND})", i.operands[0])[1]),
    ),
    "reads another column": (lambda i: i.op.startswith("tcgen05.ld"), lambda i: _address(i, 1, 1)),
    # control flow
    "off by one in a bound": (
        lambda i: i.op in ("setp.lt.s32", "setp.ge.s32", "setp.lt.u32", "setp.ge.u32"),
        lambda i: _operation(i, ".lt.", ".le.") if ".lt." in i.op else _operation(i, ".ge.", ".gt."),
    ),
    "loop one round short": (
        lambda i: (
            i.op in ("setp.ne.b32", "setp.ne.s32")
            and i.operands[2:]
            and i.operands[2].isdigit()
            and i.operands[2] != "0"
        ),
        lambda i: _immediate(i, 2, -1),
    ),
    "every lane elected": (
        lambda i: i.op == "elect.sync",
        lambda i: f"setp.eq.u32 {i.operands[0].split('|')[1]}, 0, 0;",
    ),
}


def _early_release(lines, found):
    """A release moved in front of the last use it protects: commits before their MMA, arrivals before a wait."""
    uses = ("tcgen05.mma", "tcgen05.ld", "wgmma.wait_group")
    previous, barrier = None, 0
    for ins in found:
        if ins.op.startswith(uses):
            previous = ins
        releases = ins.op.startswith("tcgen05.commit") or ins.op.startswith("mbarrier.arrive.shared")
        if not releases or previous is None or previous.line <= barrier:
            continue
        barrier = ins.line
        moved = [*lines]
        moved[ins.line] = ""
        registers = set(re.findall(r"%\w+", ins.source))
        between = [i for i in found if previous.line < i.line < ins.line]
        first = previous.line
        if ins.guard or any(set(re.findall(r"%\w+", i.operands[0])) & registers for i in between if i.operands):
            continue  # its operands are computed in between
        moved[first] = f"{ins.source}\n{moved[first]}"
        yield ins, moved


def mutants(text, per_kind=3) -> Iterator[Mutant]:
    """All deletions of synchronising instructions, and ``per_kind`` evenly spread places of each semantic kind."""
    lines = text.splitlines()
    found = list(instructions(text))
    count: Counter[str] = Counter()

    def make(kind, ins, changed):
        name = f"{kind}@{ins.op.split('.L2::')[0]}"
        count[name] += 1
        return Mutant(f"{name}#{count[name]}", kind, ins.line, ins.source, "\n".join(changed))

    def replaced(ins, new):
        return [*lines[: ins.line], new, *lines[ins.line + 1 :]]

    for ins in found:
        if _SYNCHRONISING.match(ins.op):
            yield make("delete", ins, replaced(ins, _delete(ins)))
    for kind, (applies, change) in KINDS.items():
        places = [i for i in found if applies(i)]
        step = max(1, len(places) / per_kind)
        for n in range(min(per_kind, len(places))):
            ins = places[int(n * step)]
            new = change(ins)
            if new is not None:
                yield make(kind, ins, replaced(ins, new))
    for op in sorted({i.op for i in found if i.op.startswith(("fence.", "tcgen05.fence", "wgmma.fence"))}):
        same = [i for i in found if i.op == op]
        kept = [*lines]
        for ins in same:
            kept[ins.line] = ""
        if len(same) > 1:  # compilers repeat fences: one deletion alone proves little
            yield make("no fence of a kind", same[0], kept)
    early = list(_early_release(lines, found))
    for ins, moved in early[:per_kind]:
        yield make("early release", ins, moved)


def reached(text, line) -> str:
    """The text with a trap instead of a line: if that runs to the end, the line is never executed."""
    lines = text.splitlines()
    return "\n".join([*lines[:line], "trap;", *lines[line + 1 :]])
