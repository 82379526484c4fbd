package kubeapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	etcdserverpb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"drover.io/drover/api"
)

// Who watches asks the database for what comes after the revision it knows. If the database was lost or restored from
// an older copy, its revisions begin again below that, and such a watch sees nothing for a long time, without any
// error. So every start leaves a mark in the database and beside it, and the next start tells whether one goes on from
// the other.

const lineageFile = "etcd-lineage.json"

// lineage is what <dir>/etcd-lineage.json says of the last server.
type lineage struct {
	Start    string `json:"start"`    // the mark that it left in the database
	Revision int64  `json:"revision"` // the database was at least this far
	Clean    bool   `json:"clean"`    // and exactly this far when the server ended
}

// startKey holds the mark. It is outside of what the API server keeps.
var startKey = []byte("/drover/start")

// follow compares the database with what the last server left, and leaves a new mark. It reports true where the
// database is another one, or an older state.
func (s *store) follow(ctx context.Context, dir string) (back bool, err error) {
	defer func() {
		if err != nil {
			err = api.Errorf(api.Unavailable, "history of the state database: %w", err)
		}
	}()
	s.lineage = filepath.Join(dir, lineageFile)
	b, err := os.ReadFile(s.lineage)
	known := err == nil
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	var was lineage
	if known && json.Unmarshal(b, &was) != nil {
		s.log.Warn("what the last server left beside its database cannot be read", "file", s.lineage)
		was.Start = "unknown" // so it counts as another one
	}
	got, err := s.etcd.Server.Range(ctx, &etcdserverpb.RangeRequest{Key: startKey})
	if err != nil {
		return false, err
	}
	mark := ""
	if len(got.Kvs) == 1 {
		mark = string(got.Kvs[0].Value)
	}
	rev := got.Header.Revision
	// After a kill the last revisions were not noted: a copy from the moment of the last note looks the same.
	back = known && (mark != was.Start || rev < was.Revision || rev == was.Revision && !was.Clean)
	s.start = randomToken()
	if _, err := s.etcd.Server.Put(ctx, &etcdserverpb.PutRequest{Key: startKey, Value: []byte(s.start)}); err != nil {
		return false, err
	}
	return back, s.note(false)
}

// note writes down how far the database is.
func (s *store) note(clean bool) error {
	b, err := json.Marshal(lineage{s.start, s.etcd.Server.KV().Rev(), clean})
	if err != nil {
		return fmt.Errorf("history of the state database: %w", err)
	}
	return writeFile(s.lineage, append(b, '\n'))
}
