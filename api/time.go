package api

import "time"

// latestTime is the end of the last year that RFC 3339 and the API server can write.
var latestTime = time.Date(9999, time.December, 31, 23, 59, 59, 0, time.UTC)

// BoundTime returns the nearest time to t that an object can have: the years 1 to 9999, in UTC. Readers of a store
// bound each time that the store tells, because a status with any other time cannot be written.
func BoundTime(t time.Time) time.Time {
	switch t = t.UTC(); {
	case t.Before(time.Time{}):
		return time.Time{}
	case t.After(latestTime):
		return latestTime
	}
	return t
}
