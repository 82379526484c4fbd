package cli_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

func newTarget(name string) *api.BackupTarget {
	t := &api.BackupTarget{Spec: api.BackupTargetSpec{BackupTargetURL: "file:///srv/" + name}}
	t.Name = name
	return t
}

// place creates objects, and removes them at the end of the test.
func place(t *testing.T, objects ...client.Object) {
	t.Helper()
	for _, o := range objects {
		if err := store.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		remove(t, o)
	}
}

// remove deletes an object with its finalizers at the end of the test.
func remove(t *testing.T, o client.Object) {
	t.Cleanup(func() {
		patch := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))
		_ = store.Patch(context.Background(), o.DeepCopyObject().(client.Object), patch)
		_ = store.Delete(context.Background(), o.DeepCopyObject().(client.Object))
	})
}

// unavailable is the status of a target that cannot be used.
func unavailable(t *api.BackupTarget, reason, message string) {
	t.Status.Available = false
	t.Status.Conditions = []metav1.Condition{{Type: api.ConditionUnavailable, Status: metav1.ConditionTrue, Reason: reason,
		Message: message, LastTransitionTime: metav1.Now()}}
}

// TestTargetCreateWaitsUntilTheTargetIsAvailable: target create uses the name default, remarks why it waits, ends
// when the target is available, and warns of a published password.
func TestTargetCreateWaitsUntilTheTargetIsAvailable(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	remove(t, newTarget("default"))
	remarks, done := make(heard, 1000), make(chan result, 1)
	go func() { done <- droverTo(ctx, remarks, kubeconfig("target", "create", "file:///srv/backups")...) }()
	if err := status(ctx, "default", func(b *api.BackupTarget) {
		unavailable(b, api.ReasonUnreachable, "the folder is not mounted")
	}); err != nil {
		t.Fatal(err)
	}
	remarks.await(t, ctx, `target "default" waits: the folder is not mounted`)
	if err := status(ctx, "default", func(b *api.BackupTarget) {
		b.Status.Available, b.Status.Conditions = true, nil
	}); err != nil {
		t.Fatal(err)
	}
	r := within(t, "end of target create", done)
	r.mustSay(t, 0, `target "default" is available, in`)
	remarks.await(t, ctx, "has the published password")
	var b api.BackupTarget
	if err := store.Get(ctx, client.ObjectKey{Name: "default"}, &b); err != nil ||
		b.Spec.BackupTargetURL != "file:///srv/backups" || b.Spec.Poll() != api.DefaultPollInterval ||
		b.Spec.CredentialSecret != nil || b.Spec.ReadOnly {
		t.Errorf("%v, %+v", err, b.Spec)
	}
	drover(t, kubeconfig("target", "create", "file:///srv/backups")...).
		mustSay(t, 5, "already", "drover target show default")
	drover(t, kubeconfig("target", "show")...).mustSay(t, 0, "file:///srv/backups", "every 5m")
}

// TestTargetCreateFailsForAReasonThatLasts: target create ends with the reason and exit code 1 if only a user can make
// the target available, and with exit code 4 and the reason after --timeout.
func TestTargetCreateFailsForAReasonThatLasts(t *testing.T) {
	remove(t, newTarget("locked"))
	pen(t, "locked", func(b *api.BackupTarget) {
		unavailable(b, api.ReasonWrongPassword, "no key opens with the password")
	})
	drover(t, kubeconfig("target", "create", "locked", "file:///srv/locked", "--secret", "logins/locked")...).
		mustSay(t, 1, `target "locked" is unavailable: no key opens`, "drover target delete locked")
	var b api.BackupTarget
	if err := store.Get(t.Context(), client.ObjectKey{Name: "locked"}, &b); err != nil ||
		*b.Spec.CredentialSecret != (api.SecretRef{Namespace: "logins", Name: "locked"}) {
		t.Errorf("%v, %+v", err, b.Spec)
	}
	for _, patience := range []string{"1s", "5s", "30s"} { // on a busy machine the reason may come later than in a second
		name := "far-" + patience
		remove(t, newTarget(name))
		pen(t, name, func(b *api.BackupTarget) { unavailable(b, api.ReasonUnreachable, "connection refused") })
		r := drover(t, kubeconfig("target", "create", name, "s3://b@r/p", "--timeout", patience)...)
		if patience == "30s" || strings.Contains(r.err, "connection refused") {
			r.mustSay(t, 4, "timed out after "+patience, "not available yet: connection refused")
			return
		}
	}
}

// write writes a file with a secret.
func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestTargetCreateMakesTheSecret: the files become a Secret which the target names; no output has a value. Another
// password never replaces the first, and a refused target leaves no Secret.
func TestTargetCreateMakesTheSecret(t *testing.T) {
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "backup-target-sealed"}}
	key := client.ObjectKeyFromObject(secret)
	remove(t, newTarget("sealed"))
	remove(t, secret)
	password := write(t, "password", "open sesame\n")
	logins := write(t, "s3.env", "# of the bucket\n\nAWS_ACCESS_KEY_ID=AKIA7\nAWS_SECRET_ACCESS_KEY = hush=/+hush \r\n")
	argv := kubeconfig("target", "create", "sealed", "s3://b@r/p", "--wait=false", "--password-file", password,
		"--credentials-file", logins, "--poll-interval", "0", "--read-only", "-o", "yaml")
	for range 2 { // the same Secret serves the same target again
		r := drover(t, argv...)
		r.mustSay(t, 0, "name: backup-target-sealed", "namespace: default", "readOnly: true", "pollInterval: 0s")
		if strings.Contains(r.out+r.err, "sesame") || strings.Contains(r.out+r.err, "hush") {
			t.Errorf("the command prints a secret:\n%s%s", r.out, r.err)
		}
		var have corev1.Secret
		if err := store.Get(t.Context(), key, &have); err != nil {
			t.Fatal(err)
		}
		if len(have.Data) != 3 || string(have.Data["BACKUP_PASSWORD"]) != "open sesame" ||
			string(have.Data["AWS_ACCESS_KEY_ID"]) != "AKIA7" || string(have.Data["AWS_SECRET_ACCESS_KEY"]) != "hush=/+hush" ||
			have.Type != corev1.SecretTypeOpaque {
			t.Errorf("%s: %q", have.Type, have.Data)
		}
		r = drover(t, kubeconfig("target", "delete", "sealed")...)
		r.mustSay(t, 0, `target "sealed" deleted; the store keeps its backups`, "secret default/backup-target-sealed stays")
	}
	other := write(t, "other", "open barley")
	r := drover(t, kubeconfig("target", "create", "sealed", "file:///srv/x", "--wait=false", "--password-file", other)...)
	r.mustSay(t, 5, "secret default/backup-target-sealed exists already", "kubectl -n default delete secret")
	if strings.Contains(r.err, "sesame") || strings.Contains(r.err, "barley") {
		t.Errorf("the command prints a secret: %s", r.err)
	}
	var have corev1.Secret
	if err := store.Get(t.Context(), key, &have); err != nil || string(have.Data["BACKUP_PASSWORD"]) != "open sesame" {
		t.Errorf("the first password was replaced: %v", err)
	}
	if err := store.Delete(t.Context(), secret); err != nil {
		t.Fatal(err)
	}
	drover(t, kubeconfig("target", "create", "sealed", "file:///srv/x", "--wait=false")...).
		mustSay(t, 0, "target show sealed")
	drover(t, argv...).mustSay(t, 5, `target "sealed" exists already`)
	if err := store.Get(t.Context(), key, &have); !apierrors.IsNotFound(err) {
		t.Errorf("a refused target left a Secret: %v", err)
	}
}

// TestTargetCreateRefusesAtOnce: target create refuses impossible input before any object exists, and never prints
// content of a file, or a URL with a password.
func TestTargetCreateRefusesAtOnce(t *testing.T) {
	credentials := func(path string) []string { return []string{"file:///srv/x", "--credentials-file", path} }
	for name, c := range map[string]struct {
		code int
		args []string
		want string
	}{
		"scheme":        {2, []string{"http://host/share"}, "nfs://HOST:/PATH, cifs://"},
		"path":          {2, []string{"/srv/backups"}, "file:///PATH, nfs://HOST:/PATH"},
		"two slashes":   {2, []string{"file://srv/backups"}, "three slashes"},
		"no bucket":     {2, []string{"s3:///path"}, "s3://BUCKET@REGION/PATH"},
		"password":      {2, []string{"s3://key:hush@bucket/p"}, "--credentials-file"},
		"name":          {2, []string{"Not_A_Name", "file:///srv/x"}, "lower-case"},
		"interval":      {2, []string{"file:///srv/x", "--poll-interval", "-1s"}, "--poll-interval"},
		"secret":        {2, []string{"file:///srv/x", "--secret", "a/b/c"}, "NAMESPACE/NAME"},
		"both":          {2, []string{"file:///srv/x", "--secret", "a", "--password-file", "/x"}, "leave one"},
		"no file":       {3, []string{"file:///srv/x", "--password-file", "/nosuch/file"}, "/nosuch/file"},
		"endless":       {2, []string{"file:///srv/x", "--password-file", "/dev/zero"}, "more than 64 KiB"},
		"empty":         {2, []string{"file:///srv/x", "--password-file", "/dev/null"}, "no password"},
		"no lines":      {2, []string{"file:///srv/x", "--credentials-file", "/dev/null"}, "no line KEY=VALUE"},
		"several lines": {2, []string{"file:///srv/x", "--password-file", write(t, "a", "hush\nhush\n")}, "several lines"},
		"published":     {2, []string{"file:///srv/x", "--password-file", write(t, "b", "drover\n")}, "published"},
		"no key":        {2, credentials(write(t, "c", "hush")), "line 1 is not KEY=VALUE"},
		"other key":     {2, credentials(write(t, "d", "\nHUSH=1")), "line 2 has an unknown key"},
		"certificate":   {2, credentials(write(t, "e", "AWS_CERT=hush")), "several lines"},
		"quotes":        {2, credentials(write(t, "f", `AWS_ENDPOINTS="hush"`)), "quotes out"},
		"no value":      {2, credentials(write(t, "g", "AWS_ENDPOINTS=")), "no value"},
		"twice": {2, credentials(write(t, "h", "NO_PROXY=hush\nNO_PROXY=hush")),
			"line 2 has NO_PROXY again"},
		"two passwords": {2, []string{"file:///srv/x", "--password-file", write(t, "i", "hush"), "--credentials-file",
			write(t, "j", "RESTIC_PASSWORD=hush")}, "RESTIC_PASSWORD already"},
	} {
		t.Run(name, func(t *testing.T) {
			r := drover(t, kubeconfig(append([]string{"target", "create", "--wait=false"}, c.args...)...)...)
			r.mustSay(t, c.code, c.want)
			if strings.Contains(strings.ToLower(r.out+r.err), "hush") {
				t.Errorf("the command prints a secret: %s", r.err)
			}
		})
	}
	var list api.BackupTargetList
	if err := store.List(t.Context(), &list); err != nil || len(list.Items) > 0 {
		t.Errorf("%v, %d targets", err, len(list.Items))
	}
}

// TestTargetSyncWaitsForAListOfItsOwn: target sync makes a new value even if the last request is of the same second or
// of a clock that is ahead, and ends only when this request was followed. A store that could not be searched is an
// error.
func TestTargetSyncWaitsForAListOfItsOwn(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	b := newTarget("synced")
	ahead := metav1.NewTime(time.Now().Add(time.Hour).Truncate(time.Second))
	b.Spec.SyncRequestedAt = &ahead
	place(t, b)
	b.Status.SyncedRequest = &ahead
	unavailable(b, api.ReasonUnreachable, "connection refused")
	if err := store.Status().Update(ctx, b); err != nil {
		t.Fatal(err)
	}
	sync := func(answer func(*api.BackupTarget)) result {
		t.Helper()
		remarks, done := make(heard, 1000), make(chan result, 1)
		go func() { done <- droverTo(ctx, remarks, kubeconfig("target", "sync", "synced")...) }()
		now, err := await.Until(ctx, store, "synced", func(b *api.BackupTarget) (bool, error) {
			return b.Spec.SyncRequestedAt.After(b.Status.SyncedRequest.Time), nil
		})
		if err != nil {
			t.Fatal(err)
		}
		remarks.await(t, ctx, `target "synced" waits: connection refused`)
		now.Status.SyncedRequest = now.Spec.SyncRequestedAt
		answer(now)
		if err := store.Status().Update(ctx, now); err != nil {
			t.Fatal(err)
		}
		r := within(t, "end of target sync", done)
		for len(remarks) > 0 {
			r.err += <-remarks
		}
		return r
	}
	r := sync(func(b *api.BackupTarget) { unavailable(b, api.ReasonUnreachable, "connection refused again") })
	r.mustSay(t, 1, `target "synced" is unavailable: connection refused again`, "drover target show synced")
	r = sync(func(b *api.BackupTarget) { b.Status.Available, b.Status.Conditions, b.Status.Backups = true, nil, 7 })
	r.mustSay(t, 0, `target "synced" has 7 backups, searched in`)
	drover(t, kubeconfig("target", "sync")...).mustSay(t, 3, "drover target create URL")
}

// TestTargetDeleteLeavesBackupsInTheStore: target delete refuses while backups of the target exist. With --force the
// target is deleted first, and no node ever sees the deletion of an ended Backup begin, because the target's node would
// delete the backup in the store. A Backup in progress is deleted in the usual way. Other targets keep their backups.
func TestTargetDeleteLeavesBackupsInTheStore(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	target := newTarget("leaving")
	target.Finalizers = []string{"drover.io/test"}
	ended, running, other := newBackup("left-ended", "v", "leaving"), newBackup("left-running", "v", "leaving"),
		newBackup("left-other", "v", "staying")
	place(t, target, ended, running, other)
	ended.Status.State, running.Status.State = api.BackupCompleted, api.BackupInProgress
	for _, b := range []*api.Backup{ended, running} {
		if err := store.Status().Update(ctx, b); err != nil {
			t.Fatal(err)
		}
	}
	drover(t, kubeconfig("target", "delete", "leaving")...).
		mustSay(t, 5, "backups left-ended, left-running", "--force")
	w, err := store.Watch(ctx, &api.BackupList{}, client.MatchingFields{"metadata.name": "left-ended"},
		&client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: ended.ResourceVersion}})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	done := make(chan result, 1)
	go func() { done <- droverIn(ctx, kubeconfig("target", "delete", "leaving", "--force")...) }()
	deleted, err := await.Until(ctx, store, "leaving", func(b *api.BackupTarget) (bool, error) {
		return b.DeletionTimestamp != nil, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, was := range []*api.Backup{ended, running} {
		var now api.Backup
		err := store.Get(ctx, client.ObjectKeyFromObject(was), &now)
		if err != nil || now.ResourceVersion != was.ResourceVersion {
			t.Errorf("%s changed before the target was deleted: %v", was.Name, err)
		}
	}
	deleted.Finalizers = nil
	if err := store.Update(ctx, deleted); err != nil {
		t.Fatal(err)
	}
	r := within(t, "end of target delete", done)
	r.mustSay(t, 0, "the store keeps its backups, of which 2 objects were deleted")
	for e := range w.ResultChan() {
		if e.Type == watch.Deleted {
			break
		}
		if b, ok := e.Object.(*api.Backup); !ok || b.DeletionTimestamp != nil {
			t.Fatalf("the deletion of an ended backup is seen: %s %+v", e.Type, e.Object)
		}
	}
	var now api.Backup
	if err := store.Get(ctx, client.ObjectKeyFromObject(running), &now); err != nil || now.DeletionTimestamp == nil {
		t.Errorf("the backup in progress is not being deleted: %v", err)
	}
	if err := store.Get(ctx, client.ObjectKeyFromObject(other), &now); err != nil || now.DeletionTimestamp != nil {
		t.Errorf("the backup of another target: %v", err)
	}
	drover(t, kubeconfig("target", "delete", "leaving")...).mustSay(t, 3, "drover target list")
	// An interrupted command is continued.
	drover(t, kubeconfig("target", "delete", "leaving", "--force")...).mustSay(t, 0, "1 object")
}
