package main

// foreignCalls: 32-bit programs are other files on arm64, there is no entry.
var foreignCalls = map[string]foreign{}

func int80(_, _, _, _ uint32) int32 { return 0 }
