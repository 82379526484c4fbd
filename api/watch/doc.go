// Package watch holds the parts from which the reconcilers of a room build their watches: indexes of the manager's
// cache, predicates, requests and numeric settings. The package runs no goroutine and takes one lock, around the list
// of managers that have the indexes.
package watch
