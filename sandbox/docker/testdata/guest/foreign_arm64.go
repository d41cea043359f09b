package main

// foreignCalls: 32-bit programs are other files on arm64, there is no entry.
var foreignCalls = map[string]func() int32{}
