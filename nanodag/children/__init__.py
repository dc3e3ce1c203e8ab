"""Child processes: started, spoken to, watched and ended, with all that they start. No torch here.

    child.py        a supervised child process
    fork_server.py  an interpreter that makes an object once and forks for each request
    forks.py        the asking end of that
    tree.py         processes below one, their memory, who inherits and ends them, and programs that leave none behind

`tree` and `fork_server` run in other packages' interpreters too: they need the standard library alone.
"""
