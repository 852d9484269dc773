"""Bytes between ranks: the only room that calls ``torch.distributed`` collectives."""
