package driver

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"
	"time"

	"drover.io/drover/block/pace"
)

// TestDataProcessCountsGuests: the node role reads what the data process answers. A data process that does not know the
// question, and one that does not run, are errors.
func TestDataProcessCountsGuests(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "data.sock")
	count := countGuests(socket)
	if _, err := count(t.Context()); err == nil {
		t.Error("no data process: no error")
	}
	ln, err := listenUnix(socket)
	if err != nil {
		t.Fatal(err)
	}
	want := pace.GuestIO{Requests: 7, Latency: 3 * time.Second}
	known := false
	s := &httptest.Server{Listener: ln, Config: &http.Server{Handler: http.HandlerFunc(
		func(w http.ResponseWriter, r *http.Request) {
			if known && r.URL.Path == guestsPath {
				_ = json.NewEncoder(w).Encode(want)
			} else {
				http.NotFound(w, r)
			}
		})}}
	s.Start()
	defer s.Close()
	if got, err := count(t.Context()); err == nil {
		t.Errorf("an old data process answers %+v", got)
	}
	known = true
	if got, err := count(t.Context()); err != nil || got != want {
		t.Errorf("got %+v, %v", got, err)
	}
}
