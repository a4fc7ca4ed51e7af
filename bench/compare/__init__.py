"""Two pools against workers that do both, on the same cores under the same load: `diptych bench compare`.

    systems (`systems`) ──started in turns (`run`)──▶ a cell's load (`load`) ──▶ numbers, best of each (`numbers`)
                                                                                    │
                                             table, JSON (`report`), page (`page`), plots (`plots`) ◀──┘

Who starts a system's processes is handed in. Imports no torch.
"""
