// Package table lays out tables and single strings for people at a terminal:
// columns aligned by display width, ages and sizes in words, and every string
// that a user, a program or an image may have chosen made inert.
//
// It knows no terminal: the caller says how wide it is and whether it takes
// colours. It serves boxedctl and the SSH lobby. Start reading at [Table]; the
// rule that matters for security is [Inert].
package table
