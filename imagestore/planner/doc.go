// Package planner is the controller role's half of the room. It gives an image its UUID and layer UID before any byte
// is written, decides which disks hold a copy, and asks nodes for copies through the specs of ImageCopies. Nodes carry
// decisions out and answer in the statuses.
//
// planCopies (copy_plan.go) and describeImage (status.go) are pure functions with tables of cases. The imageReconciler
// collects their input from the cache, creates, patches and deletes ImageCopies, and is the only writer of the status
// of BackingImages.
//
// The manager owns and awaits the goroutines of the reconcilers; the package starts no other goroutine.
//
// Lock order: nodeWatch.mu is the only lock, and is never held over a request to the API.
package planner
