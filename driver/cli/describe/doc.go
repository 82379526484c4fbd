// Package describe writes what the commands show of objects: fields, rows of tables and events. The texts hold no
// control characters (package text). An event is read from the API server; a user without the right to read events sees
// none. The package has no state and starts no goroutines.
package describe
