"""What engines behind HTTP have in common, whatever the product: processes, requests, retries, weights, recovery.

A product's package implements two classes, and a third for the way in which its servers take weights:

- `ServerApi` (in `api`): the server's endpoints. `health`, `weight_version`, `generate`, `probe` (log-probs of given
  tokens) and `perform` (one step of a weight update) are required; `inspect`, `abort`, `reset` and `release` are for
  products that support them. Failed calls raise `Fault` (in `http`), as calls of `Client` do.
- `ServerEngine` (in `engine`): the engine that a recipe names. `api` wraps a client, `make_transport` chooses the
  transport, and `start` returns the servers that a rank pushes weights to: `launch_server(ServerCommand(...))`, or
  `connect(url)` for a running one. From `bind` on, `runtime`, `weight_dtype` and `fleet` may be read. Engines of a
  product with a command line are `SeparateServers` or `RankServers` (in `launched`).
- A `Transport` (in `transports`): shared files, shared memory or CUDA IPC, a process group, or a folder on disk. The
  subclass adds the product's calls, in `load`, `join`, `finish` or `adapt`.

Where few elements of the weights have changed, a `FileTransport(changes=True)` sends only these; the server passes what
comes to a `WeightReceiver` (in `changes`), which refuses changes of weights that it does not have. A `ChangesTransport`
does so over HTTP, for products that fuse tensors: their servers keep a copy, in a `CheckpointReceiver`.

`states` defines the order in which a server takes weights; `ServerRetryPolicy` (in `retry`) the options of all engines.
`fleet`, `weights`, `recovery` and `requests` do the rest and need nothing from a product. No product is named in this
package. `plugins/rlkit-engine-http` is the smallest complete example.
"""
