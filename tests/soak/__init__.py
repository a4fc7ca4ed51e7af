"""The soak: a real cluster under load, whose workers are killed and stopped and whose clients leave, judged at the end.

python -m tests.soak --minutes 20 --seed 1 --connector shm          (make soak)

plan.py      what is asked when, and who is disturbed when: all of it from the seed
asking.py    one request over gRPC or HTTP, and what was heard of its answer
firm.py      how far an answer does not hang on the last bits of a logit
truth.py     what each question's answer is, taken while nothing disturbs, and whether an answer is that
cluster.py   `diptych up` as a child: its ready file, its signals, its logs
watching.py  what the operating system knows of its processes: memory, descriptors, sockets, shared memory
recording.py that over time, for every process
judging.py   pure: from everything that was seen to a list of what must not be
run.py       puts them together; __main__.py is the command
"""
