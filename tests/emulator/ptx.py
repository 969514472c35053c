"""PTX modules for tests, written by hand."""

HEADER = """
.version 8.7
.target {arch}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry kernel({params})
{{
  .reg .pred %p<16>;
  .reg .b16 %h<16>;
  .reg .b32 %r<64>;
  .reg .b64 %rd<32>;
  .reg .f32 %f<64>;
  .reg .b128 %q<4>;
"""

# %r0 thread, %r1 warp, %r2 shared base, %p0 first thread of the CTA; %rd0.. the pointer parameters
PROLOGUE = """
  mov.u32 %r0, %tid.x;
  shr.u32 %r1, %r0, 5;
  mov.u32 %r2, smem;
  setp.eq.s32 %p0, %r0, 0;
"""


def module(body, pointers=0, arch="sm_90a"):
    """A module of one kernel with ``pointers`` parameters that are loaded to %rd0, %rd1, ..."""
    params = ", ".join(f".param .u64 a{i}" for i in range(pointers))
    loads = "".join(f"  ld.param.b64 %rd{i}, [a{i}];\n" for i in range(pointers))
    return HEADER.format(arch=arch, params=params) + PROLOGUE + loads + body + "\n  ret;\n}\n"


def only(warp, body, label):
    """``body`` executed by one warp."""
    return f"  setp.ne.s32 %p15, %r1, {warp};\n  @%p15 bra {label};\n{body}\n{label}:\n"
