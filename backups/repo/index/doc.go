// Package index owns the knowledge of which blob lies where: the index files of a repository, as bytes, and the table
// of all their entries in a local file.
//
// An index file is JSON; restic's design document ("Indexing") has the format, and the field packs_to_delete is that of
// rustic. Scan reads such a file as a stream, FileBuilder makes one.
//
// A table is a sorted file of pages with checksums (see table.go). A lookup reads one page for the entry, and one for
// the name of the pack; only eight bytes of each page are in memory: half a MiB for a repository of 10 TiB. The kernel
// keeps the pages that are in use. The file is read, not mapped: a mapping was no faster (docs/performance.md), and a
// read of a damaged or cut file returns an error where an access to a mapping kills the process.
//
// TableBuilder makes a table from entries in any order, and from an older table, with bounded memory. Each pack of a
// table has the index file that names the pack, so the next table forgets the packs of an index file that vanished, and
// no caller reads the other files again.
//
// A mark in an index file says that a verification found a pack damaged or missing. The table keeps the entries of the
// pack, behind all others of the same blob, and says that it does not have a blob which only damaged packs have. Any
// index file may mark any pack; the mark goes with the last index file that has the mark.
//
// Invariants: a table is immutable, holds an entry for each pack that has a blob, and never returns an entry of a
// damaged page. The file is a cache: after damage the caller builds a new one from the index files. No process changes
// a file that has its name; builders replace the file whole.
//
// The package starts no goroutine. A Table is safe for concurrent use; TableBuilder.mu is held while entries are sorted
// and written to the local file.
package index
