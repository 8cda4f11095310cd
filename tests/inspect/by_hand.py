"""Small scheduled modules written by hand."""


def module(*lines, more=""):
    """A scheduled module of these lines; a f32[256] weighs 1 KiB."""
    body = "\n".join(f"  {line}" for line in lines)
    return f"""HloModule by_hand, is_scheduled=true

%dot_fusion (p: f32[256]) -> f32[256] {{
  %p = f32[256]{{0}} parameter(0)
  ROOT %d = f32[256]{{0}} dot(%p, %p), metadata={{op_name="jit(f)/transpose(jvp())/dot_general"}}
}}
{more}
ENTRY %main (x: f32[256]) -> f32[256] {{
  %x = f32[256]{{0}} parameter(0)
{body}
}}
"""


def work(name, cycles, scope="jvp()", calls=""):
    metadata = f'metadata={{op_name="jit(f)/{scope}/mul"}}'
    return f'%{name} = f32[256]{{0}} fusion(%x){calls}, {metadata}, backend_config={{"estimated_cycles":"{cycles}"}}'


def start(name, opcode="all-to-all", after="x", scope=""):
    groups = "replica_groups={{0,1,2,3},{4,5,6,7}}"
    groups += f', metadata={{op_name="jit(f)/{scope}/all_to_all"}}' if scope else ""
    return f"%{name} = ((f32[256]{{0}}), f32[256]{{0}}, u32[]) {opcode}-start(%{after}), {groups}"


def done(name, opcode="all-to-all"):
    return f"%{name}.done = f32[256]{{0}} {opcode}-done(%{name})"
