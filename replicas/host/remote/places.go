package remote

import (
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"sync"

	"drover.io/drover/api"
	"drover.io/drover/replicas/sources"
)

// Known is the content of the places file: which disks this node served, and where other nodes were.
type Known struct {
	Disks map[api.UID]string `json:"disks,omitempty"`
	Nodes map[string]string  `json:"nodes,omitempty"`
	// Far has the sources of layers that this node lacks.
	Far map[string][]sources.Source `json:"far,omitempty"`
}

// Places is a file of hints for the time before a process reaches the API. Without the file the process asks the API.
type Places struct {
	path string // empty: there is no file
	log  *slog.Logger
	mu   sync.Mutex
}

// NewPlaces has a file by its path; empty: nothing is kept.
func NewPlaces(path string, log *slog.Logger) *Places { return &Places{path: path, log: log} }

// Get reads the file.
func (p *Places) Get() Known {
	k := Known{Disks: map[api.UID]string{}, Nodes: map[string]string{}, Far: map[string][]sources.Source{}}
	if p.path == "" {
		return k
	}
	if b, err := os.ReadFile(p.path); err == nil {
		_ = json.Unmarshal(b, &k)
	}
	return k
}

// Change changes the file.
func (p *Places) Change(change func(*Known)) {
	if p.path == "" {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	k := p.Get()
	change(&k)
	b, err := json.Marshal(k)
	tmp := filepath.Join(filepath.Dir(p.path), "."+filepath.Base(p.path))
	if err == nil {
		err = os.WriteFile(tmp, b, 0o600)
	}
	if err == nil {
		err = os.Rename(tmp, p.path)
	}
	if err != nil {
		p.log.Warn("the places of other nodes cannot be kept", "file", p.path, "err", err)
	}
}
