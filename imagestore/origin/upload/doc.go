// Package upload is the HTTP server of a node for images that users send. The importer expects an upload and receives
// an address with a token; the sender puts the image there in one request, or continues in further requests after a
// cut. The answer to the sender is the outcome of the import.
//
// Invariants: one request at a time supplies bytes; a byte is taken once, in order; an upload that ended takes no
// further byte.
//
// Goroutines: those of the HTTP server, which Server.Start awaits. The importer reads an Upload in a goroutine of its
// own. Lock order: Server.mu, then Upload.mu.
package upload
