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

// A watch asks the database for changes after a known revision. If the database was lost or restored from an older
// copy, its revisions continue below the known revision, and such a watch receives nothing for a long time, without an
// error. So every start leaves a mark in the database and beside the database, and the next start compares both marks.

const lineageFile = "etcd-lineage.json"

// lineage is the content of <dir>/etcd-lineage.json, written by the last server.
type lineage struct {
	Start    string `json:"start"`    // the mark of the last start in the database
	Revision int64  `json:"revision"` // the least revision of the database
	Clean    bool   `json:"clean"`    // Revision is exact: the server ended cleanly
}

// startKey holds the mark, outside of the API server's prefix.
var startKey = []byte("/drover/start")

// checkLineage compares the database with the last server's lineage, and writes a new mark. checkLineage reports true
// for another database and for an older state.
func (s *store) checkLineage(ctx context.Context, dir string) (back bool, err error) {
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
		s.log.Warn("the history file of the last server cannot be read", "file", s.lineage)
		was.Start = "unknown" // counts as another database
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
	// A killed server did not record its last revisions: a copy from the moment of the last note looks the same.
	back = known && (mark != was.Start || rev < was.Revision || rev == was.Revision && !was.Clean)
	s.start = randomToken()
	if _, err := s.etcd.Server.Put(ctx, &etcdserverpb.PutRequest{Key: startKey, Value: []byte(s.start)}); err != nil {
		return false, err
	}
	return back, s.recordRevision(false)
}

// recordRevision records the revision of the database.
func (s *store) recordRevision(clean bool) error {
	b, err := json.Marshal(lineage{s.start, s.etcd.Server.KV().Rev(), clean})
	if err != nil {
		return fmt.Errorf("history of the state database: %w", err)
	}
	return writeFile(s.lineage, append(b, '\n'))
}
