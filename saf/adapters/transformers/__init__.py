"""Models of transformers: `adapter` answers for all of them, `family` says what differs, in a file a family.

`attention` is what they attend by, told by `mask` and `cache` of a pass; `entrance` and `generation` refuse first what
frozen heads cannot follow, `folder` is what `save_pretrained` writes of them.
"""
