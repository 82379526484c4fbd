// Package http downloads an image over http or https as an origin.Stream. A server with ranges and a validator (a
// strong ETag or a date) sends several ranges at once (rangeWindow); any other server sends all bytes over one
// connection.
//
// Invariants: bytes of different validators never mix; credentials go to the named server alone; messages carry no
// credentials and no query; each silence of a server has a limit.
//
// Goroutines: the workers of a rangeWindow, which Close of the Stream waits for. Lock order: rangeWindow.mu and
// server.mu are never held together.
package http
