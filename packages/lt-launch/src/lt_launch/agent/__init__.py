"""What runs on the nodes: it starts the processes of a job there, watches them and says how they ended.

Standard library only and Python 3.9, because it is sent along with the job: `lt launch` writes a copy of this package
to `<out>/launch/agent/`, which any python runs as `python3 <out>/launch/agent COMMAND ...` without lt-launch installed
(where lt-launch is installed, `python -m lt_launch.agent COMMAND ...` is the same).

Each stage has a folder `<out>/launch/stages/<stage>/` (an array's element `<stage>.<index>/`):

    spec.json                   what to run (`lt_launch.spec`), one for all elements of an array: in `<stage>/`
    attempt-000/                one start of all its processes
        node-00000.jsonl        what the agent of a node saw: processes started and ended, losses, signals
        rank-00000.log          what a process wrote, standard output and error together
        first.json              the first failure: whichever agent came first could make the file
        exit.json               how the attempt ended: {kind, code, reason, first, step, ...}
    done.json                   the stamp of a stage that is done, by content

The commands, each with the path of a spec.json:

    open SPEC [--index I]       before: prints "skip" where the stage is done already, else makes the folder of the next
                                attempt and prints its number
    node SPEC --attempt A --node-rank N --master-addr HOST --master-port PORT [--index I] [--control]
                                all processes of one node; ends with 0, 75, the code of the first failure, or 128 + the
                                signal that ended it; with --control it obeys JSON lines on standard input and ends
                                everything when they stop coming
    verdict SPEC --attempt A [--index I] [--code N]
                                after: reads what the agents noted, names the first failure (rank, host, code, last
                                lines), writes exit.json and the stamp; N is what the spawner itself ended with. Ends
                                with 0 done, 75 to be started again, else the first failure's code. A job that trains is
                                done only when rank 0 noted so in its run directory
    again SPEC --attempt A [--index I]
                                whether another attempt is wise (kind, number of restarts, progress): 0 yes, 1 no, with
                                the reason on standard output

SIGTERM, SIGINT, SIGUSR1, SIGUSR2 and SIGHUP to `node` go on to the processes once, which then have the whole
`grace_s` before SIGKILL. LT_ARRAY_INDEX is set in elements of arrays.
"""
