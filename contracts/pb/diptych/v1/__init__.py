"""Generated from proto/ by tools/gen_proto.py; not edited by hand."""
