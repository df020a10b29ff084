"""A start of the real job on all of its ranks that trains nothing: a table of checks.

`torchrun ... pretrain_bdlm.py CONFIG --preflight`. command.py has the order of the checks, start.py
the rank's place and the job's store, rounds.py who waits for whom, board.py what ranks tell one
another without a process group, findings.py the verdict over all ranks and its words. The checks:
degrees.py, machine.py (of one rank), groups.py, sample.py, shared.py (of many).
"""
