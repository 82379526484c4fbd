package cli_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/keys"
)

// TestBackupMountRefusesAtOnce: backup mount and unmount refuse wrong lines and unknown backups, and make no volume.
func TestBackupMountRefusesAtOnce(t *testing.T) {
	longhorn, theirs := newTarget("mounted-longhorn"), newBackup("mounted-theirs", "v", "mounted-longhorn")
	place(t, newTarget("mounted"), newBackup("mounted", "v", "mounted"), longhorn, theirs)
	longhorn.Status.Format = api.FormatLonghorn
	theirs.Status.State, theirs.Status.VolumeSize, theirs.Status.URL = api.BackupCompleted, 10<<20, "s3://b@r/?backup=b&volume=v"
	for _, o := range []client.Object{longhorn, theirs} {
		if err := store.Status().Update(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	full := t.TempDir()
	if err := os.WriteFile(filepath.Join(full, "x"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	node := &api.Node{}
	node.Name = hostname(t)
	place(t, node)
	for _, c := range []struct {
		code int
		args string
		want string
	}{
		{2, "mount", "usage: drover backup mount"},
		{2, "mount mounted", "--device-only"},
		{2, "mount mounted " + dir + " --device-only", "leave the folder"},
		{2, "mount mounted " + dir + " --partition -1", "the first partition is 1"},
		{5, "mount mounted " + full, "is not empty"},
		{3, "mount nosuch " + dir, "drover backup list"},
		{6, "mount mounted " + dir, "not completed"},
		{1, "mount mounted-theirs " + dir, "drover backup verify mounted-theirs"},
		{3, "unmount mounted", "neither the folder nor the backup"},
	} {
		drover(t, kubeconfig(append([]string{"backup"}, strings.Fields(c.args)...)...)...).mustSay(t, c.code, c.want)
	}
	var list api.VolumeList
	if err := store.List(t.Context(), &list, client.HasLabels{api.LabelBackupMount}); err != nil || len(list.Items) > 0 {
		t.Errorf("volumes %+v, %v", list.Items, err)
	}
}

func hostname(t *testing.T) string {
	t.Helper()
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	return strings.ToLower(name)
}

// answer writes the answer of a node into the status of a target, once the spec has a request.
func answer(ctx context.Context, name string, asked func(*api.BackupTarget) bool, write func(*api.BackupTarget)) error {
	_, err := await.Until(ctx, store, name, func(t *api.BackupTarget) (bool, error) { return asked(t), nil })
	if err == nil {
		_, err = await.EditStatus(ctx, store, name, func(t *api.BackupTarget) (bool, error) { write(t); return true, nil })
	}
	return err
}

// TestBackupLocks: backup locks prints the answer of the node, without control characters of the store, and fails with
// the reason of the node.
func TestBackupLocks(t *testing.T) {
	place(t, newTarget("locked"))
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	run := func(message string, args ...string) result {
		done := make(chan result, 1)
		go func() {
			done <- droverIn(ctx, kubeconfig(append([]string{"backup", "locks", "--target", "locked"}, args...)...)...)
		}()
		err := answer(ctx, "locked", func(t *api.BackupTarget) bool {
			q := t.Spec.LocksRequest
			return q != nil && q.RemoveStale == (len(args) > 0) && (t.Status.Locks == nil || !t.Status.Locks.Request.At.Equal(&q.At))
		}, func(t *api.BackupTarget) {
			hour := metav1.NewTime(time.Now().Add(-time.Hour))
			t.Status.Locks = &api.LocksFact{Request: *t.Spec.LocksRequest, Message: message, Removed: 2, Total: 3,
				Locks: []api.LockFact{{Name: strings.Repeat("ab", 32), Program: "restic", Hostname: "far\x1b[2J", PID: 7,
					Exclusive: true, Stale: true, RefreshedAt: &hour},
					{Name: strings.Repeat("cd", 32), Program: "drover", Sweep: true, Since: &hour}}}
		})
		if err != nil {
			t.Fatal(err)
		}
		return within(t, "end of backup locks", done)
	}
	r := run("")
	r.mustSay(t, 0, "abababab", "restic", "far", "exclusive", "60m ago", "yes", "sweep", "and 1 older ones")
	if strings.Contains(r.out, "\x1b") {
		t.Errorf("a lock moves the cursor: %q", r.out)
	}
	run("", "--remove-stale").mustSay(t, 0, "2 stale locks removed")
	run("the store permits no deletion", "--remove-stale").mustSay(t, 1, "the store permits no deletion")
	drover(t, kubeconfig("backup", "locks", "--target", "nosuch")...).mustSay(t, 3, "drover target list")
}

// TestKeyExport: the file has the recovery password of the Secret, which gets a random one if it has none. The request
// ends with the command, also if the command fails, and a failed command writes no file.
func TestKeyExport(t *testing.T) {
	target := newTarget("exported")
	target.Spec.CredentialSecret = &api.SecretRef{Namespace: "default", Name: "exported"}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "exported"}}
	place(t, newTarget("published"), target)
	file := filepath.Join(t.TempDir(), "key")
	export := func(name string) []string {
		return kubeconfig("backup", "key", "export", "--target", name, "--out", file)
	}
	drover(t, export("published")...).mustSay(t, 1, "published one, drover", api.SecretBackupPassword)
	drover(t, export("exported")...).mustSay(t, 3, "secret default/exported does not exist")
	place(t, secret)

	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	run := func(fact api.KeyFileFact) result {
		done := make(chan result, 1)
		go func() { done <- droverIn(ctx, export("exported")...) }()
		err := answer(ctx, "exported", func(t *api.BackupTarget) bool { return t.Spec.KeyRequestedAt != nil },
			func(t *api.BackupTarget) {
				fact.Request = *t.Spec.KeyRequestedAt
				t.Status.KeyFile = &fact
			})
		if err != nil {
			t.Fatal(err)
		}
		r := within(t, "end of backup key export", done)
		var now api.BackupTarget
		if err := store.Get(ctx, client.ObjectKey{Name: "exported"}, &now); err != nil || now.Spec.KeyRequestedAt != nil {
			t.Errorf("the request stays: %+v, %v", now.Spec, err)
		}
		now.Status.KeyFile = nil
		if err := store.Status().Update(ctx, &now); err != nil {
			t.Fatal(err)
		}
		return r
	}
	keyFile := func(password string) api.KeyFileFact {
		content, err := keys.Wrap(blob.Secret{}, password, "host", "user")
		if err != nil {
			t.Fatal(err)
		}
		return api.KeyFileFact{Name: blob.Sum(content).String(), Content: content}
	}
	run(api.KeyFileFact{Message: "the target is read-only"}).mustSay(t, 1, "the target is read-only")
	run(api.KeyFileFact{Name: strings.Repeat("ab", 32), Content: []byte("{}")}).mustSay(t, 1, "does not match its name")
	run(keyFile("of another target")).mustSay(t, 1, "does not open with this password")
	if _, err := os.Stat(file); err == nil {
		t.Error("a failed export writes the file")
	}
	if err := store.Get(ctx, client.ObjectKeyFromObject(secret), secret); err != nil {
		t.Fatal(err)
	}
	password := string(secret.Data[api.SecretRecoveryPassword])
	if len(password) < 26 {
		t.Errorf("the Secret has the recovery password %q", password)
	}
	r := run(keyFile(password))
	r.mustSay(t, 0, file)
	text, err := os.ReadFile(file)
	if err != nil || !strings.Contains(string(text), "\npassword: "+password+"\n") {
		t.Errorf("the file: %v\n%s", err, text)
	}
	if strings.Contains(r.out+r.err, password) {
		t.Error("the command prints the password")
	}
	drover(t, export("exported")...).mustSay(t, 5, "exists already")
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	secret.Data[api.SecretRecoveryPassword] = []byte(" blank\n")
	if err := store.Update(ctx, secret); err != nil {
		t.Fatal(err)
	}
	drover(t, export("exported")...).mustSay(t, 2, "white space around it")
}
