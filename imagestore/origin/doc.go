// Package origin is the contract between an import and the place that its bytes come from: a Stream of bytes in order,
// with the size where the origin announces the size. Below lie the origins: http (downloads), upload (the server that
// takes images from users) and registry (OCI images). A file of the node is an origin as well (OpenFile).
//
// The importer finds the format in the bytes, never in a name or a header.
//
// Every origin is hostile input. The package holds the defences that all origins share: Guard refuses connections to
// addresses outside the public internet, messages carry no credentials, and announced ranges are checked.
//
// A Stream belongs to one goroutine. The package starts no goroutine.
package origin
