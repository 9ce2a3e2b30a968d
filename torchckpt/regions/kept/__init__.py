"""What ``keep`` leaves for a replay.

    record            the calls of one forward, in order; the saved-tensor hooks that a thread has entered
    result            what one of them returned, drew and changed
    torch_region      a region of torch's own checkpointing
"""
__all__: list[str] = []
