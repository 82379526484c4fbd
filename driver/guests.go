package driver

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"

	"drover.io/drover/block/pace"
)

// guestsPath is where the data process tells how many requests its volumes have answered.
const guestsPath = "/guests"

// countGuests asks the data process.
func countGuests(socket string) func(context.Context) (pace.GuestIO, error) {
	h := dataClient(socket)
	return func(ctx context.Context) (count pace.GuestIO, err error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://data"+guestsPath, nil)
		if err != nil {
			return count, err
		}
		resp, err := h.Do(req)
		if err != nil {
			return count, err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK { // a data process of an earlier version
			return count, fmt.Errorf("requests of the guests: the data process answers %s", resp.Status)
		}
		err = json.NewDecoder(io.LimitReader(resp.Body, 4<<10)).Decode(&count)
		return count, err
	}
}
