package describe

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/util/duration"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/driver/cli/text"
)

// showEvents is the number of events shown for an object.
const showEvents = 10

// EventsOf returns the latest events of an object of a kind, and of objects of the other kinds with the same name,
// oldest first. eventsOf omits events of an earlier object of the name. A user without the right to read events sees no
// events.
func EventsOf(ctx context.Context, c client.Client, o client.Object, kind string, others ...string) []eventsv1.Event {
	var list eventsv1.EventList
	if err := c.List(ctx, &list, client.MatchingFields{"regarding.name": o.GetName()}); err != nil {
		return nil
	}
	all := slices.DeleteFunc(list.Items, func(e eventsv1.Event) bool {
		if e.Regarding.Kind == kind {
			return e.Regarding.UID != o.GetUID()
		}
		return !slices.Contains(others, e.Regarding.Kind) || lastSeen(&e).Before(o.GetCreationTimestamp().Time)
	})
	return LatestEvents(all)
}

// LatestEvents returns the latest events, oldest first.
func LatestEvents(all []eventsv1.Event) []eventsv1.Event {
	slices.SortStableFunc(all, func(a, b eventsv1.Event) int { return lastSeen(&a).Compare(lastSeen(&b)) })
	return all[max(0, len(all)-showEvents):]
}

func lastSeen(e *eventsv1.Event) time.Time {
	switch {
	case e.Series != nil && !e.Series.LastObservedTime.IsZero():
		return e.Series.LastObservedTime.Time
	case !e.EventTime.IsZero():
		return e.EventTime.Time
	}
	return e.CreationTimestamp.Time
}

// Events writes a table of events, if any.
func Events(w io.Writer, all []eventsv1.Event) {
	if len(all) == 0 {
		return
	}
	fmt.Fprintln(w, "\nEvents:")
	var rows [][]string
	for i := range all {
		e := &all[i]
		times := ""
		if e.Series != nil {
			times = strconv.Itoa(int(e.Series.Count))
		}
		rows = append(rows, []string{duration.HumanDuration(time.Since(lastSeen(e))), e.Type, e.Reason, times, e.Note})
	}
	_ = text.Table(w, "AGE TYPE REASON TIMES NOTE", rows)
}
