"""Files of torch.save, read without running what is in them and written without torch.

Why its zip reader and writer are not torch's own (`torch._C.PyTorchFileReader`, `PyTorchFileWriter`), where torch is
installed anyway; tried with 2.15:

- Its writer takes a record as a whole: a conversion, which fills hundreds of files at once block by block, would hold
  whole tensors of all of them, and a writer of a chunk of a distributed checkpoint is not at a file's beginning.
- Its archive is named after the file, so the bytes of a tensor's file depend on the path it was first written to.
- It writes through the page cache without fsync, or calls back for every piece, which is the writer here again.
- Its reader returns a record with a flipped bit; it never compares the CRC that lies beside it.
- Both would stay twice: the base installs without torch, and its files must be the same with and without.

The unpickler stays because nothing else refuses what it refuses, and its own pickles are the few opcodes it reads.
"""
