package targets

import (
	"log/slog"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
	"drover.io/drover/driver/kubeapi/apitest"
)

// TestBucketWorksTheWholeWay: a bucket becomes a repository, lists a backup of another cluster, deletes the backup, and
// is swept.
func TestBucketWorksTheWholeWay(t *testing.T) {
	w := newWorld(t, "node-1")
	backend := s3mem.New()
	must(t, backend.CreateBucket("backups"))
	server := httptest.NewServer(gofakes3.New(backend).Server())
	t.Cleanup(server.Close)
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "bucket", Namespace: "default"}, Data: map[string][]byte{
		api.SecretEndpoints: []byte(server.URL), api.SecretAccessKey: []byte("key"), api.SecretSecretKey: []byte("hush"),
		api.SecretBackupPassword: []byte("right")}}
	w.Create(secret)
	const url = "s3://backups@us-east-1/some/where"
	w.Create(&api.BackupTarget{ObjectMeta: apitest.Named("default"), Spec: api.BackupTargetSpec{BackupTargetURL: url,
		CredentialSecret: &api.SecretRef{Name: "bucket", Namespace: "default"}}})
	w.awaitReason("default", api.ReasonAvailable, "")

	store, err := addressOpener(nil, slog.New(slog.DiscardHandler))(t.Context(), url, secret.Data)
	must(t, err)
	r, err := repo.Open(t.Context(), store, "right", repo.Options{Cache: t.TempDir()})
	must(t, err)
	s := &shelf{TB: t, r: r}
	id := s.save(1<<20, factsOf("b").Tags()...)
	w.sync("default")
	b := w.backups()["b"]
	if b == nil || b.Status.URL != url+"?backup=b&volume=vol" || b.Status.State != api.BackupCompleted {
		t.Fatalf("found %+v", b)
	}
	w.Delete(b)
	w.AwaitDeleted(b, &api.BackupList{})
	w.clock.advance(time.Minute)
	w.wake("default")
	st := w.awaitTarget("default", "swept", func(b *api.BackupTarget) bool {
		return b.Status.SweepRequested == nil
	}).Status
	if s.has(id) || st.LastSweep.FreedBytes < 1<<20 {
		t.Errorf("status %+v, %+v", st, st.LastSweep)
	}
}
