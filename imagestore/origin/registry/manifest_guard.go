package registry

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"

	"drover.io/drover/api"
)

// Limits of a manifest. Registries allow 4 MiB.
const (
	maxManifest = 4 << 20
	maxEntries  = 1000   // of one list or object
	maxTokens   = 100000 // of the whole manifest: each costs memory
)

type manifestKey struct{}

// guardManifests marks the requests of a context as requests for manifests, wherever redirects lead.
func guardManifests(ctx context.Context) context.Context {
	return context.WithValue(ctx, manifestKey{}, true)
}

// manifestGuard is the transport below the library for manifests. It reads a manifest within the limits before the
// library parses the manifest, because the library allows 100 MiB and any number of entries.
type manifestGuard struct{ base http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (g *manifestGuard) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Context().Value(manifestKey{}) == nil {
		return g.base.RoundTrip(req)
	}
	req = req.Clone(req.Context())
	req.Header.Set("Accept-Encoding", "identity")
	resp, err := g.base.RoundTrip(req)
	if err != nil || resp.StatusCode != http.StatusOK {
		return resp, err
	}
	defer resp.Body.Close()
	if err := checkEncoding(resp); err != nil {
		return nil, err
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxManifest+1))
	if err != nil {
		return nil, err
	}
	if len(body) > maxManifest {
		return nil, api.Errorf(api.OutOfRange, "the manifest is larger than %d MiB", maxManifest>>20)
	}
	if err := checkEntries(body); err != nil {
		return nil, api.Errorf(api.OutOfRange, "the manifest %w", err)
	}
	resp.Body = io.NopCloser(bytes.NewReader(body))
	return resp, nil
}

// checkEncoding refuses an answer that the registry packed: digests and lengths count the bytes of the content.
func checkEncoding(resp *http.Response) error {
	if e := resp.Header.Get("Content-Encoding"); e != "" && e != "identity" {
		return api.Errorf(api.Unsupported, "the registry packed the answer (%s) though it was asked not to", clipText(e))
	}
	return nil
}

// checkEntries bounds the entries of a JSON text. Four million bytes can hold a million entries. A text that is no JSON
// passes: its reader reports the fault.
func checkEntries(body []byte) error {
	dec := json.NewDecoder(bytes.NewReader(body))
	var left []int // tokens that each open list or object may still have
	for tokens := 0; ; tokens++ {
		t, err := dec.Token()
		if err != nil {
			return nil //nolint:nilerr // the end, or no JSON
		}
		if tokens == maxTokens {
			return fmt.Errorf("has more than %d parts", maxTokens)
		}
		d, _ := t.(json.Delim)
		top := len(left) - 1
		if d == ']' || d == '}' {
			left = left[:top]
			continue
		}
		if top >= 0 {
			if left[top]--; left[top] < 0 {
				return fmt.Errorf("has a list of more than %d entries", maxEntries)
			}
		}
		switch d {
		case '[':
			left = append(left, maxEntries)
		case '{':
			left = append(left, 2*maxEntries) // names and values
		}
	}
}
