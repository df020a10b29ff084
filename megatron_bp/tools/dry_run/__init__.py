"""A look at a run that starts nothing: shapes, parameters, rows, bytes and memory of a GPU.

`pretrain_bdlm.py CONFIG --dry-run`. command.py sets the stage, meta.py makes the model without
memory, facts.py gathers what is told, text.py puts it in words.
"""
