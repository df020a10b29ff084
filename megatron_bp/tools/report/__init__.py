"""The report of a run: report.md beside its checkpoints, from what the run left on record there.

run.py writes it at the end of a run, command.py again from the folder; numbers.py counts, page.py
puts it in words.
"""
