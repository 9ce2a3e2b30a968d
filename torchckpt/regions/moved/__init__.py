"""A region whose saved tensors go to the host after its forward, and are back before its backward.

    region            one call: what it saves and moves; ``release()`` and ``issue()``, for a schedule
    order             when regions are released and fetched: by themselves, or by a plan that names boundaries
    slot              the place of one saved tensor, and how it is put together again
    copies            the copies of one device, and all waits; memory of the host, pinned once
"""
__all__: list[str] = []
