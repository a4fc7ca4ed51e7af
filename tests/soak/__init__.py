"""The soak: a real cluster under load, whose workers are killed and stopped and whose clients leave, judged at the end.

python -m tests.soak --minutes 20 --seed 1 --connector shm          (make soak)
python -m tests.soak --minutes 1 --registry redis                   (make soak MINUTES=1 REGISTRY=redis)

With a Redis there are two routers, asked in turn; they and Redis are killed, stopped, emptied, full and silent as well. Whose
router is killed may hear an error; nobody else may.

plan.py      what is asked when, and who is disturbed when: all of it from the seed
asking.py    one request over gRPC or HTTP, and what was heard of its answer
firm.py      how far an answer does not hang on the last bits of a logit
truth.py     what each question's answer is, taken while nothing disturbs, and whether an answer is that
cluster.py   `diptych up` as a child: its ready file, its signals, its logs
routers.py   the routers as a balancer in front of them sees them, and whose failure is excused
sharing.py   a Redis and a second router beside the cluster, and what befalls them
watching.py  what the operating system knows of its processes: memory, descriptors, sockets, shared memory
recording.py that over time, for every process
judging.py   pure: from everything that was seen to a list of what must not be
run.py       puts them together; __main__.py is the command
"""
