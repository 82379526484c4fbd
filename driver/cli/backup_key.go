package cli

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/localfile"
	"drover.io/drover/driver/cli/recoverykey"
)

func (a *app) backupKey() *cobra.Command {
	c := groupCommand("key", "The recovery key of a target's repository")
	c.AddCommand(a.backupKeyExport())
	return c
}

func (a *app) backupKeyExport() *cobra.Command {
	target, out := "", ""
	c := &cobra.Command{
		Use: "export", Short: "Write a file that opens the backups without the cluster",
		Long: "Writes a new file with the store's URL, a recovery password, and a key file that opens with this password,\n" +
			"although the password of the target, or the key files in the store, are lost. The recovery password is\n" +
			api.SecretRecoveryPassword + " of the target's Secret; the command adds a random one to a Secret without.\n" +
			"Keep the file outside of the cluster: everybody with the file and the store can read and delete all backups.",
		Example: "  drover backup key export\n  drover backup key export --target offsite --out /media/usb/offsite-key",
		Args:    checkArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, done := a.withTimeout(cmd)
			defer done()
			c, err := a.newClient()
			if err != nil {
				return err
			}
			if out == "" {
				out = target + "-recovery-key"
			}
			// The file comes last; a name that cannot be used should change nothing before.
			if _, err := os.Lstat(out); err == nil {
				return api.Errorf(api.Exists, "file %s exists already: choose another name with --out", out)
			} else if _, err := os.Stat(filepath.Dir(out)); err != nil {
				return api.Errorf(api.NotFound, "folder of %s: %w", out, err)
			}
			key, err := exportKey(ctx, c, target, cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			if err := localfile.WriteSecret(out, key.Text()); err != nil {
				return err
			}
			a.printOutcome(cmd, "backup target", target, "has its recovery key in "+out+": keep the file outside of the cluster")
			return nil
		},
	}
	c.Flags().StringVar(&target, "target", api.DefaultBackupTarget, "backup target")
	c.Flags().StringVar(&out, "out", "", "file to write (default: TARGET-recovery-key)")
	return c
}

// exportKey asks the node of a target for the key file of the recovery password. The key file is in the status of the
// target until exportKey returns.
func exportKey(ctx context.Context, c client.WithWatch, name string, remarks io.Writer) (
	_ *recoverykey.Key, err error) {
	var t api.BackupTarget
	if err := getTarget(ctx, c, name, &t); err != nil {
		return nil, err
	}
	ref := t.Spec.CredentialSecret
	switch {
	case t.Status.Format == api.FormatLonghorn:
		return nil, api.Errorf(api.Unsupported, "target %q is a store of Longhorn, which has no key", name)
	case ref == nil:
		return nil, api.Errorf(api.Unsupported, "target %q has no Secret, so its password is the published one, %s, and no "+
			"key is secret: make a Secret with %s first", name, api.PublishedPassword, api.SecretBackupPassword)
	}
	password, err := ensureRecoveryPassword(ctx, c, *ref)
	if err == nil {
		err = recoverykey.CheckPassword(password) // before the repository gets a key file for it
	}
	if err != nil {
		return nil, err
	}
	var asked metav1.Time
	err = requestOf(ctx, c, name, func(t *api.BackupTarget) error {
		asked = api.NewRequest(t.Spec.KeyRequestedAt)
		t.Spec.KeyRequestedAt = &asked
		return nil
	})
	if err != nil {
		return nil, err
	}
	defer func() {
		ctx, cancel := cleanup(ctx)
		defer cancel()
		err = errors.Join(err, requestOf(ctx, c, name, func(t *api.BackupTarget) error {
			if asked.Equal(t.Spec.KeyRequestedAt) { // a later request is of another command
				t.Spec.KeyRequestedAt = nil
			}
			return nil
		}))
	}()
	now, err := awaitAnswer(ctx, c, name, "the key file of target %q is not read yet%s", remarks,
		func(t *api.BackupTarget) bool {
			return t.Status.KeyFile != nil && !t.Status.KeyFile.Request.Before(&asked)
		})
	if err != nil {
		return nil, err
	}
	fact := now.Status.KeyFile
	if fact.Message != "" {
		return nil, api.Errorf(api.Other, "target %q: key file: %s", name, fact.Message)
	}
	key := &recoverykey.Key{Target: name, URL: now.Spec.BackupTargetURL, Repository: now.Status.RepositoryID,
		Password: password, Name: fact.Name, Content: fact.Content, Written: time.Now()}
	return key, key.Check()
}

// ensureRecoveryPassword returns the recovery password of a Secret, and adds a random one to a Secret without.
func ensureRecoveryPassword(ctx context.Context, c client.Client, ref api.SecretRef) (string, error) {
	for {
		var s corev1.Secret
		if err := c.Get(ctx, client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}, &s); apierrors.IsNotFound(err) {
			return "", api.Errorf(api.NotFound, "secret %s/%s does not exist: create the Secret of the target", ref.Namespace,
				ref.Name)
		} else if err != nil {
			return "", explain(ctx, err)
		}
		if have := bytes.TrimRight(s.Data[api.SecretRecoveryPassword], "\r\n"); len(have) > 0 {
			return string(have), nil
		}
		if s.Data == nil {
			s.Data = map[string][]byte{}
		}
		password := strings.ToLower(rand.Text())
		s.Data[api.SecretRecoveryPassword] = []byte(password)
		err := c.Update(ctx, &s)
		if err == nil {
			return password, nil
		}
		if !apierrors.IsConflict(err) {
			return "", explain(ctx, fmt.Errorf("secret %s/%s: %w", ref.Namespace, ref.Name, err))
		}
	}
}
