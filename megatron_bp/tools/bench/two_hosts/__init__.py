"""Two hosts joined by a slow link: what each form of attention's communication costs a step.

The hosts are network namespaces of this machine, made and removed by scripts/bench_two_hosts.sh,
and the link between them is limited by the kernel. Ranks run the real pretrain_bdlm.py.
"""
