"""What a step does: its work, and what becomes of it.

    choice            the states of a block, and the policies
    host              host memory and the link to it; when a block leaves, and when it comes back
    block             seconds and bytes of blocks, stages and links; as users give them, checked; one collective
    partition         layers cut into stages
"""
__all__: list[str] = []
