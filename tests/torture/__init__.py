"""Attacks on everything that a person, a file, a client or a power cut can do to deeprnn.

    make torture                                        # 20 minutes; TORTURE_MINUTES=5 for less
    python -m tests.torture --minutes 1 --seed 7        # the same order of cases again
    python -m tests.torture --only damage --minutes 5   # one attack
    python -m tests.torture --list

An attack is a function that tries cases until its share of the time is over. Ten lines are one:

    @attack("empty names")
    def empty_names(arena: Arena) -> None:
        \"\"\"An empty name in place of a run: one sentence.\"\"\"
        for command in arena.each(["evaluate", "generate", "resume", "export"]):
            with arena.case(f"{command} ''"):
                check_polite(deeprnn(command, ""))

Put it into a file of its own in this folder and name the file in `ATTACKS` of `driver.py`. `arena.each` goes
through its items in an order that follows from the seed; `arena.case` counts what happens inside it and turns
a failed assertion or an exception into a finding. `child.py` runs things in bounded processes, `disk.py` stands
between a process and its disk.
"""
