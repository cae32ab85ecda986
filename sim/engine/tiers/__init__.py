"""KV memory behind the device: host memory, disks and peers, what each keeps, and the links that KV crosses.

The room owns what a tier keeps and gives up, and how long a transfer takes on a link that others use too. It must not know queues,
plans or machines. Read `tiers` first, then `stores` and `links`.
"""
