"""What a server does under load, measured from outside: `diptych bench serve`.

    data (`synthetic`, `files`, `traces`) ──▶ BenchRequest ─┐
    arrivals (`arrivals`) ──────────────────────────────────┴─▶ `drive` ──▶ Outcome ──▶ `measures` ──▶ JSON, page, plots
                                                                  │
                                                                  ▼
                                                      Target: `grpc_target`, `openai_target`

The server may be ours over gRPC or anybody's that speaks OpenAI's API. Imports no torch.
"""
